"""Settings of the data that a run learns from; a default lives here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from nemo_aligner.config.common import Checks, Malformed, Overlong, setting


@dataclass
class DataPrefixConfig:
    """Files of every part."""

    train: list[str] = setting([], "files to train on")
    validation: list[str] = setting([], "files to validate on, each as a set of its own")
    test: list[str] = setting([], "files to measure the finished model on, once, at the end")
    train_weights: list[float] = setting(
        [], "weights of the training files; []: by number of records"
    )

    def __post_init__(self) -> None:
        with Checks("model.data.data_prefix", self) as checks:
            are_weights = all(0 < weight < inf for weight in self.train_weights)
            checks.require(are_weights, "train_weights", "numbers above 0")
            for part in ("train", "validation", "test"):
                wanted = "files alone; weights of training files go into train_weights"
                checks.require(not any(map(_is_number, getattr(self, part))), part, wanted)

    @property
    def all_files(self) -> list[str]:
        """Those of every part, in the order of the parts."""
        return [*self.train, *self.validation, *self.test]


def _is_number(text: str) -> bool:
    """Whether it is one of the weights that NeMo writes between the files; 2024_10 is a file."""
    if "_" in text:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass
class DataConfig:
    """What is read, and how a text becomes token ids: the rules of the scoring contract.

    Where ``template``, ``chat_template_kwargs``, ``add_bos`` or ``add_eos`` is null, the reward
    model that training starts from decides, and for a base model its tokenizer.
    """

    data_prefix: DataPrefixConfig = field(default_factory=DataPrefixConfig)
    format: str = setting("auto", "auto, or a format's name (docs/data.md)")
    prompt_key: str | None = setting(None, "field with the prompt (null: prompt)")
    chosen_key: str | None = setting(None, "field with the chosen reply (null: chosen)")
    rejected_key: str | None = setting(None, "field with the rejected reply (null: rejected)")
    system_prompt_file: str | None = setting(None, "system prompt for conversations that have none")
    prompt_file: str | None = setting(
        None, "text around the last user turn; {} stands for the turn"
    )
    input_template: str | None = setting(
        None, "write prompt and reply as raw text; {} stands for the prompt"
    )
    seq_length: int = setting(1024, "most tokens of a text")
    overlong: Overlong = setting(Overlong.drop, "what to do with a longer text")
    template: str | None = setting(
        None, "tokenizer (its own), chatml, llama3, plain, zephyr, or a file"
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        None, "more variables for the template, as {enable_thinking: false} (null: none)"
    )
    add_bos: bool | None = setting(None, "put BOS before every text")
    add_eos: bool | None = setting(None, "put EOS after every text")
    allow_prompt_overlap: bool = setting(False, "allow prompts in both training and validation")
    malformed: Malformed = setting(
        Malformed.error, "records that cannot be read: stop with an error, or skip them"
    )
    max_malformed: float = setting(0.01, "largest share of a file that may be skipped, 0 to 1")

    index_dir: str | None = setting(
        None, "folder for tokenized files (null: next to files of 4 MiB or more)"
    )
    keep_index: bool = setting(True, "keep tokens on the disk for the next start")

    def __post_init__(self) -> None:
        with Checks("model.data", self) as checks:
            checks.require(
                self.keep_index or self.index_dir is None,
                "index_dir",
                "null, as model.data.keep_index is false",
            )
            checks.positive("seq_length")
            checks.fraction("max_malformed")


@dataclass
class RegressionConfig:
    """The labels of rated replies."""

    attributes: list[str] = setting([], "label columns, in the order of label lists")
    attribute_weights: dict[str, float] = setting(
        {}, "weights by attribute for the combined reward; {}: 1 each"
    )
    loss_mask_val: float = setting(-100.0, "number that means a missing label, like null")

    def __post_init__(self) -> None:
        with Checks("model.regression", self) as checks:
            are_names = all(name.strip() for name in self.attributes)
            checks.require(are_names, "attributes", "names, none of them empty")
