"""Model card of an exported reward model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nemo_aligner.contract.contract import ScoringContract

_CARD = """---
license: {license}
library_name: {library}
pipeline_tag: text-classification
tags:
- reward-model
---

# {name}

A reward model: it reads a conversation or a text, and gives one number for each of: {attributes}.
Higher is better. It was trained with nemo_aligner ({kind}) and exported from `{source}`.

Licence of the base model: {license}.

## Use

```python
{snippet}
```

{offsets}

The reward is read at the last token that is not padding, so a text must not end with the pad token,
{pad_token}. Loaded in fp32, the rewards are within 1e-4 of those of the archive with weights
rounded as here. Loaded in bf16, the head is rounded too, and rewards come in steps of 0.4 %.

## What a reward means

`scoring_contract.json` (hash `{hash}`) defines it:

{rules}

## Rewards

{statistics}

## Training

{training}
"""

_LOADED = """import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForSequenceClassification.from_pretrained("{name}", dtype=torch.float32).eval()
"""

_LOADED_IN_PARTS = """from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
body = AutoModel.from_pretrained("{name}", dtype=torch.float32).eval()
files = [load_file(path) for path in Path("{name}").glob("*.safetensors")]
head = {{key: file[key] for file in files for key in file if key.startswith("score.")}}
"""

_ADAPTED = """import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForSequenceClassification.from_pretrained(
    "{base}", num_labels={count}, dtype=torch.float32
)
model.config.pad_token_id = tokenizer.pad_token_id
model = PeftModel.from_pretrained(model, "{name}").eval()
"""

_SCORED = """{texts}
batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
with torch.no_grad():
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
rewards = logits{plus_means}  # [texts, {count}]"""

_SCORED_IN_PARTS = """{texts}
batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
mask = batch["attention_mask"]
with torch.no_grad():
    hidden = body(batch["input_ids"], attention_mask=mask).last_hidden_state
    last = hidden[torch.arange(len(hidden)), mask.sum(dim=1) - 1]
    {head}
rewards = logits{plus_means}  # [texts, {count}]"""

_LINEAR = """logits = last @ head["score.weight"].T"""
_TWO_LAYERS = """inner = (last @ head["score.0.weight"].T + head["score.0.bias"]).relu()
    logits = inner @ head["score.2.weight"].T + head["score.2.bias"]"""

_CONVERSATION = """conversation = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
texts = [tokenizer.apply_chat_template(conversation, tokenize=False)]"""


def model_card(
    name: str,
    contract: ScoringContract,
    pad_token: str,
    archive: Path,
    base_license: str,
    trained_in: str,
    base: str | None = None,
    *,
    is_linear: bool = True,
    is_loaded_whole: bool = True,
) -> str:
    """Render ``README.md`` of the folder ``name``; the run is looked up beside ``archive``.

    ``trained_in`` is the dtype before the export, by the contract's names. With a ``base`` the
    folder is an adapter of that model. Unless ``is_linear`` the head has two layers.
    Unless ``is_loaded_whole`` transformers has a class for the decoder only.
    """
    return _CARD.format(
        name=name,
        library="transformers" if base is None else "peft",
        license=base_license,
        attributes=", ".join(contract.attributes),
        kind={"binary_ranking": "ranking of pairs"}.get(contract.reward_model_type, "regression"),
        source=archive.name,
        snippet=_snippet(
            name, contract, base, is_linear=is_linear, is_loaded_whole=is_loaded_whole
        ),
        offsets=_offsets(contract),
        pad_token=f"`{pad_token}`",
        hash=contract.hash,
        rules="\n".join(f"- {rule}" for rule in _rules(contract, trained_in)),
        statistics=_statistics(contract),
        training="\n".join(_training(archive))
        or "The archive does not say what it was trained on.",
    )


def _snippet(
    name: str,
    contract: ScoringContract,
    base: str | None,
    *,
    is_linear: bool,
    is_loaded_whole: bool,
) -> str:
    means = list(contract.label_means)
    code = (_LOADED if base is None else _ADAPTED) + _SCORED
    if not is_loaded_whole:
        code = _LOADED_IN_PARTS + _SCORED_IN_PARTS
    return code.format(
        name=name,
        base=base,
        head=_LINEAR if is_linear else _TWO_LAYERS,
        texts=_CONVERSATION if contract.template else f"texts = [{_raw('a text', contract)}]",
        plus_means=f" + torch.tensor({means})" if any(means) else "",
        count=len(contract.attributes),
    )


def _raw(text: str, contract: ScoringContract) -> str:
    parts = [
        *(["tokenizer.bos_token"] if contract.add_bos else []),
        json.dumps(text),
        *(["tokenizer.eos_token"] if contract.add_eos else []),
        *(
            []
            if contract.reward_token_id is None
            else [f"tokenizer.decode([{contract.reward_token_id}])"]
        ),
    ]
    return " + ".join(parts)


def _offsets(contract: ScoringContract) -> str:
    if not any(contract.label_means):
        return "The logits are the rewards: add nothing to them, and apply no sigmoid."
    return (
        "**The logits alone are not the rewards.** The contract adds a constant to each (the mean "
        "of its labels, the bias of the head), and a `ForSequenceClassification` has none. Add "
        "them as above; they are `label_means` in `scoring_contract.json`. The difference between "
        "two replies is right without them."
    )


def _rules(contract: ScoringContract, trained_in: str) -> Iterator[str]:
    if contract.template:
        yield (
            "The chat template in `chat_template.jinja` renders a conversation, reply included, "
            "without a generation prompt; no BOS or EOS is added to the result."
        )
    else:
        yield "There is no chat template: texts are scored as they are."
    for token, is_added, token_id, verb in (
        ("BOS", contract.add_bos, contract.bos_id, "begins"),
        ("EOS", contract.add_eos, contract.eos_id, "ends"),
    ):
        yield (
            f"A text without roles gets {token} (id {token_id}), unless it {verb} with it."
            if is_added
            else f"A text without roles gets no {token}."
        )
    if contract.reward_token_id is not None:
        yield (
            f"The reward is read at the token {contract.reward_token_id}. The chat template writes "
            "it; behind a text without roles it has to be appended."
        )
    yield f"At most {contract.seq_length} tokens. " + (
        "A longer text keeps its last tokens, and a BOS at its beginning."
        if contract.overlong == "truncate_left"
        else "The trainer and its server refuse a longer text; transformers does not."
    )
    stored = "" if contract.dtype == trained_in else f" and is rounded to {contract.dtype} here"
    yield f"The body was trained in {trained_in}{stored}; the head in fp32."
    if any(weight != 1.0 for weight in contract.attribute_weights):
        weights = dict(zip(contract.attributes, contract.attribute_weights, strict=True))
        yield f"The combined reward is the sum with the weights {weights}."


def _statistics(contract: ScoringContract) -> str:
    if contract.reward_mean is None or contract.reward_std is None:
        return "Their mean and standard deviation were not measured."
    rows = zip(contract.attributes, contract.reward_mean, contract.reward_std, strict=True)
    return "\n".join(
        [
            f"On `{contract.measured_on}`, label means included:\n",
            "| attribute | mean | standard deviation |",
            "|---|---|---|",
            *(f"| {name} | {mean:.4g} | {std:.4g} |" for name, mean, std in rows),
        ]
    )


def _training(archive: Path) -> Iterator[str]:
    """Describe the training, from the checkpoints that a run keeps beside its archive."""
    states = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(archive.resolve().parent.glob("step_*/run_state.json"))
    ]
    if not states:
        yield "The archive is not in its run's folder, so its data are unknown."
        return
    settings, samples = states[-1]["config"], states[-1]["consumed_samples"]
    base = Path(settings["pretrained_checkpoint"]["restore_from_path"]).name
    if "data" not in settings["model"]:
        yield f"- a critic of PPO: values trained from `{base}`, on {samples} sequences of rollouts"
        return
    for part in ("train", "validation"):
        files = settings["model"]["data"]["data_prefix"][part]
        names = ", ".join(f"`{Path(file).name}`" for file in files)
        yield f"- {part} data: {names or 'none'}"
    yield f"- trained from `{base}`, {samples} records"
    # "validation-<file>/accuracy", and not "validation-<file>/by_source/<source>/accuracy"
    found = [{k: v for k, v in each["metrics"].items() if k.count("/") == 1} for each in states]
    rows = list(dict.fromkeys(name for metrics in found for name in metrics))
    if rows:
        steps = [f"after step {state['step']}" for state in states]
        yield from ("", f"| | {' | '.join(steps)} |", "|---" * (1 + len(steps)) + "|")
        for name in rows:
            yield f"| {name} | {' | '.join(_number(metrics.get(name)) for metrics in found)} |"


def _number(value: float | None) -> str:
    """Format the value of a metric; "" if it had none on its data."""
    return "" if value is None else f"{value:.4g}"
