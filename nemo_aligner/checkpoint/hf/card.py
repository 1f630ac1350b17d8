"""Model card of an exported reward model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.hf.heads import LINEAR, TWO_LAYERS
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.steps import ANSWERS, MARKS, TURNS

_CARD = """---
license: {license}
library_name: {library}
pipeline_tag: {task}
tags:
- reward-model
---

# {name}

A reward model: it reads a conversation or a text, and gives {number} for each of: {attributes}.
Higher is better. It was trained with nemo_aligner ({kind}) and exported from `{source}`.

Licence of the base model: {license}.

## Use

```python
{snippet}
```

{offsets}

{reading} Loaded in fp32, the rewards are within 1e-4 of those of the archive with weights
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
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {auto}.from_pretrained("{name}", dtype=torch.float32).eval()
"""

_WITH_BODY = """from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
body = AutoModel.from_pretrained("{name}", dtype=torch.float32).eval()
files = [load_file(path) for path in Path("{name}").glob("*.safetensors")]
head = {{key: file[key] for file in files for key in file if key.startswith("{layer}.")}}
"""

_PEFT = """import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
"""

# Where transformers has no class for a reward model of the base, this is what it would be.
_MADE_CLASS = """import torch
from peft import PeftModel
from transformers import MODEL_MAPPING, AutoConfig, AutoTokenizer
from transformers.modeling_layers import GenericForSequenceClassification

decoder = MODEL_MAPPING[type(AutoConfig.from_pretrained("{base}"))]
RewardModel = type("RewardModel", (GenericForSequenceClassification, decoder.__base__), {{}})
"""

_ADAPTED = """
tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {auto}.from_pretrained(
    "{base}", num_labels={count}, dtype=torch.float32
)
model.config.pad_token_id = tokenizer.pad_token_id
model = PeftModel.from_pretrained(model, "{name}").eval()
"""

_SCORED = """{texts}
batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
with torch.no_grad():
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
rewards = {read}{plus_means}  # [texts, {count}]"""

_SCORED_BY_BODY = """{texts}
batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
mask = batch["attention_mask"]
with torch.no_grad():
    hidden = body(batch["input_ids"], attention_mask=mask).last_hidden_state
    last = hidden[torch.arange(len(hidden)), mask.sum(dim=1) - 1]
    {head}
rewards = {read}{plus_means}  # [texts, {count}]"""

# Of the mean of a reply, whose prompt sentence-transformers leaves out.

_POOLED = """import torch
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}", model_kwargs={{"dtype": torch.float32}})
tokenizer = model.tokenizer
{texts}
before, marker, reply = texts[0].rpartition(tokenizer.decode({marker}))
logits = model.encode([reply], prompt=before + marker, convert_to_tensor=True).cpu()
rewards = {read}{plus_means}  # [replies, {count}]"""

# Of steps: a text is tokenized in parts, at whose ends rewards are read.

_STEPPED = """{parts}
ids, read = [], []
for part in parts:
    ids += tokenizer(part, add_special_tokens=False).input_ids
    read.append(len(ids) - 1)
{places}with torch.no_grad():
    {run}
rewards = {read}{plus_means}  # [steps, {count}]"""

_RUN = """logits = model(torch.tensor([ids])).logits[0, read]"""
_RUN_BODY = """last = body(torch.tensor([ids])).last_hidden_state[0, read]
    {head}"""

_TURNS = """conversation = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "7"},
]
ends = [n + 1 for n, turn in enumerate(conversation) if turn["role"] == "assistant"]
texts = [tokenizer.apply_chat_template(conversation[:end], tokenize=False) for end in ends]
parts = [text.removeprefix(before) for before, text in zip(["", *texts], texts)]"""
_ANSWERS = """steps = ["2+2=4", "4+3=7"]
conversation = [
    {{"role": "user", "content": "2+2+3?"}},
    {{"role": "assistant", "content": {separator}.join(steps)}},
]
asked, parts, before = [], [], ""
for step in [f"2+2+3? {{steps[0]}}", *steps[1:]]:
    asked += [{{"role": "user", "content": step}}, {{"role": "assistant", "content": "+"}}]
    text = tokenizer.apply_chat_template(asked, tokenize=False)
    text = text[: text.rindex("+")]
    parts.append(text.removeprefix(before))
    before = text"""
_STEPS = """steps, separator = ["2+2=4", "4+3=7"], {separator}
parts = {parts}
"""
_PARTS_OF_ENDS = """[steps[0], *(separator + step for step in steps[1:])]"""
_PARTS_OF_MARKS = """[part for step in steps for part in (step, separator)]"""
_IN_TEMPLATE = """reply = "".join(parts)
conversation = [
    {"role": "user", "content": "2+2+3?"},
    {"role": "assistant", "content": reply},
]
text = tokenizer.apply_chat_template(conversation, tokenize=False)
before, _, after = text.rpartition(reply)
parts[0] = before + parts[0]"""
_AFTER = """
parts[-1] += after"""

_LINEAR = """logits = last @ head["{layer}.weight"].T"""
_ONE_LAYER = """logits = last @ head["{layer}.weight"].T + head["{layer}.bias"]"""
_TWO_LAYERS = """inner = (last @ head["score.0.weight"].T + head["score.0.bias"]).relu()
    logits = inner @ head["score.2.weight"].T + head["score.2.bias"]"""

# Of bins: the expected value of each attribute, by the softmax of its logits.
_EXPECTED = """(logits.unflatten(1, (-1, {width})).softmax(-1) * torch.tensor({values})).sum(-1)"""

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
    form: str = LINEAR.last,
    is_loaded_whole: bool = True,
) -> str:
    """Render ``README.md`` of the folder ``name``; the run is looked up beside ``archive``.

    ``trained_in`` is the dtype before the export, by the contract's names. With a ``base`` the
    folder is an adapter of that model. ``form`` is the head's (``HeadOut``). Unless
    ``is_loaded_whole`` transformers has a class for the decoder only.
    """
    has_steps = contract.has_steps
    library, task = "transformers", f"{'token' if has_steps else 'text'}-classification"
    if contract.reply_marker is not None:
        library, task = "sentence-transformers", "feature-extraction"
    snippet = _step_snippet if has_steps else _snippet
    return _CARD.format(
        name=name,
        task=task,
        number="one number at each step" if has_steps else "one number",
        reading=_reading(contract, pad_token),
        library=library if base is None else "peft",
        license=base_license,
        attributes=", ".join(contract.attributes),
        kind={"binary_ranking": "ranking of pairs"}.get(contract.reward_model_type, "regression"),
        source=archive.name,
        snippet=snippet(name, contract, base, form, is_loaded_whole=is_loaded_whole),
        offsets=_offsets(contract),
        hash=contract.hash,
        rules="\n".join(f"- {rule}" for rule in _rules(contract, trained_in)),
        statistics=_statistics(contract),
        training="\n".join(_training(archive))
        or "The archive does not say what it was trained on.",
    )


def _snippet(
    name: str, contract: ScoringContract, base: str | None, form: str, *, is_loaded_whole: bool
) -> str:
    code = _LOADED + _SCORED if is_loaded_whole else _WITH_BODY + _SCORED_BY_BODY
    if base is not None:
        code = (_PEFT if is_loaded_whole else _MADE_CLASS) + _ADAPTED + _SCORED
    if contract.reply_marker is not None:
        code = _POOLED
    return code.format(
        name=name,
        base=base,
        auto="AutoModelForSequenceClassification"
        if is_loaded_whole or base is None
        else "RewardModel",
        marker=list(contract.reply_marker or ()),
        texts=_CONVERSATION if contract.template else f"texts = [{_raw('a text', contract)}]",
        **_read(contract, form),
    )


def _read(contract: ScoringContract, form: str) -> dict[str, Any]:
    """Parts of a program that make rewards of hidden states or logits."""
    means, readout = list(contract.label_means), contract.output_readout
    layer = form.removesuffix(".bias").partition(".2")[0]
    read = "logits"
    if readout is not None:
        values = [list(row) for row in readout.numbers]
        read = _EXPECTED.format(width=readout.width, values=values)
    elif _has_pair(contract):
        read = "logits[:, 1:]"
    head = {LINEAR.last: _LINEAR, TWO_LAYERS.last: _TWO_LAYERS}.get(form, _ONE_LAYER)
    return {
        "layer": layer,
        "head": head.format(layer=layer),
        "read": read,
        "plus_means": f" + torch.tensor({means})" if any(means) else "",
        "count": len(contract.attributes),
    }


def _has_pair(contract: ScoringContract) -> bool:
    """Tell if its only reward is exported as the second of two outputs (``HeadOut``)."""
    return contract.has_steps and contract.num_outputs == 1


def _step_snippet(
    name: str, contract: ScoringContract, base: str | None, form: str, *, is_loaded_whole: bool
) -> str:
    assert base is None, "an adapter has no steps"
    has_marks = contract.scored_position == MARKS
    parts = _TURNS
    if contract.scored_position == ANSWERS:
        parts = _ANSWERS.format(separator=json.dumps(contract.step_separator))
    elif contract.scored_position != TURNS or not contract.template:
        cut = _PARTS_OF_MARKS if has_marks else _PARTS_OF_ENDS
        parts = _STEPS.format(separator=json.dumps(contract.step_separator or ""), parts=cut)
        after = "" if has_marks else _AFTER
        parts += _IN_TEMPLATE + after if contract.template else _raw_parts(contract)
    read = _read(contract, form)
    code = (_LOADED if is_loaded_whole else _WITH_BODY) + _STEPPED
    run = _RUN if is_loaded_whole else _RUN_BODY.format(head=read["head"])
    return code.format(
        name=name,
        auto="AutoModelForTokenClassification",
        parts=parts,
        places="read = read[1::2]  # behind each step\n" if has_marks else "",
        run=run,
        **read,
    )


def _raw_parts(contract: ScoringContract) -> str:
    """Lines that put around the parts of a raw text what its contract has there."""
    lines = ["parts[0] = tokenizer.bos_token + parts[0]"] if contract.add_bos else []
    if contract.add_eos and contract.scored_position != MARKS:
        lines.append("parts[-1] += tokenizer.eos_token")
    return "\n".join(lines)


def _reading(contract: ScoringContract, pad_token: str) -> str:
    if contract.reply_marker is not None:
        return (
            "The reward is read off the mean of the reply's tokens: what comes before the reply is "
            "the prompt, as above,\nof any number of replies. A text without roles is all reply, "
            "with no prompt. A program that takes\nthe prompt into the mean gives other numbers."
        )
    if not contract.has_steps:
        return (
            "The reward is read at the last token that is not padding, so a text must not end with "
            f"the pad token,\n`{pad_token}`."
        )
    if contract.scored_position == TURNS:
        where = "at the last token of each assistant turn, with what the chat template ends it by"
    elif contract.scored_position == ANSWERS:
        where = "where the answer to each step begins, which is a turn of the user, answered `+`"
    else:
        separator = json.dumps(contract.step_separator, ensure_ascii=False)
        where = f"at the last token of the separator {separator} behind each step"
        if contract.scored_position != MARKS:
            where = (
                f"at the last token of each step, before the separator {separator}, and of the "
                "last step at the last token of the text"
            )
    return (
        f"Rewards are read {where}. The parts of a text that end there are tokenized one by one, "
        "as above.\nAt all other tokens the logits mean nothing."
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
    if _has_pair(contract):
        return (
            "The model has two outputs: the first is always 0, the second is the reward. So the "
            "second of their `softmax` is the `sigmoid` of the reward: the probability that a step "
            "is right, if the rewards are log odds (`binary_cross_entropy`)."
        )
    if contract.readout is not None:
        return (
            "**The logits are not the rewards.** They are those of bins: the reward of an "
            "attribute is the mean of its bins' values, weighted by the softmax of its logits, as "
            "above (`readout` in `config.json` has the values)."
        )
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
