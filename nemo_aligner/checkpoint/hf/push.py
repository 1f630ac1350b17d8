"""Upload an exported model to the Hugging Face hub (``nemo-aligner export --push``).

huggingface_hub finds the user's token: ``hf auth login`` stores one, or the environment variable
``HF_TOKEN`` has it.
"""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.checkpoint.conversion_cache import looks_like_hub_name
from nemo_aligner.utils.errors import CheckpointError, ConfigError, one_line

# Every file that an export may write, as patterns of paths in a repository. A new export deletes
# those that it does not replace: programs would read an old model.safetensors rather than new
# shards.
_EXPORTED = (
    "config.json", "scoring_contract.json", "adapter_config.json", "modules.json",
    "sentence_bert_config.json", "1_Pooling/config.json", "score*/config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors",
    "adapter_model.safetensors", "value_head.safetensors", "score*/model.safetensors",
)  # fmt: skip


def check_push(name: str) -> None:
    """Check the name of a repository and the login, before an export that may take minutes.

    Raises:
        ConfigError: ``name`` is not ``ORGANIZATION/NAME``, or there is no valid token.
    """
    from huggingface_hub import HfApi

    if not looks_like_hub_name(name):
        raise ConfigError(f"push: got {name!r}, wanted the name of a model as ORGANIZATION/NAME")
    try:
        HfApi().whoami()
    except Exception as error:  # the network library may raise anything
        raise ConfigError(
            f"push: the hub does not accept an upload to {name}: {one_line(error)}. Log in with "
            "`hf auth login`, or export without --push"
        ) from error


def push(output: Path, name: str) -> str:
    """Upload a folder, or a ``.gguf`` file, to the model ``name``, which is created if needed.

    A folder replaces an earlier export as a whole; other files in the repository stay.

    Returns:
        One line that says where the model is.

    Raises:
        CheckpointError: the upload failed; ``output`` stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        if output.is_dir():
            commit = api.upload_folder(
                repo_id=name, folder_path=output, delete_patterns=list(_EXPORTED)
            )
        else:
            commit = api.upload_file(repo_id=name, path_or_fileobj=output, path_in_repo=output.name)
    except Exception as error:  # the network library may raise anything
        keeps = ", but deletes no file of an earlier export there" * output.is_dir()
        raise CheckpointError(
            f"{output}: it is exported, but cannot be uploaded to {name}: {one_line(error)}. "
            f"`hf upload {name} {output}` uploads it{keeps}"
        ) from error
    return f"uploaded: {commit.commit_url}"
