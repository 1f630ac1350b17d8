"""Chat templates of published models, and conversations for them.

They come from published packages: TRL's wheel (Apache 2.0) has the original templates of Qwen,
Llama, Gemma and GLM, Axolotl's (Apache 2.0) that of Mistral. SmolLM3-3B's is in no package, so it
is downloaded from the recipe that trained it. ``dated.jinja`` is ours and resembles SmolLM3's: it
has a date, tools, and a mode that a message switches. Templates that write today's date get a fixed
one.
"""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.template_check import freeze_date
from tests.harness.environments import kept_environment, package

_TRL = ("trl==1.16.0", "trl/chat_templates")
_AXOLOTL = ("axolotl==0.19.0", "axolotl/utils/chat_templates/templates")
_FILES = {
    "qwen3": (_TRL, "qwen3"),
    "qwen2.5": (_TRL, "qwen2_5"),
    "qwen3-vl": (_TRL, "qwen3_vl"),
    "llama-3.1": (_TRL, "llama3_1"),
    "llama-3.2": (_TRL, "llama3_2"),
    "gemma-3": (_TRL, "gemma3"),
    "gemma-4": (_TRL, "gemma4"),
    "glm-4.5": (_TRL, "glm4moe"),
    "mistral-v3": (_AXOLOTL, "mistral_v2v3"),
}
_SMOLLM3 = (
    "https://raw.githubusercontent.com/huggingface/alignment-handbook/"
    "925acdfe4b2b4e38c3dabd1851bc418f0b656351/recipes/smollm3/sft/sft.yaml"
)
_SMOLLM3_SHA256 = "9dc3f4a23132279f8f515fbec16938dc056d68782c2c25eafd208fa71ae9de3e"
KWARGS = {"llama-3.1": {"date_string": "1 May 2026"}}


def read_templates() -> dict[str, str]:
    """Return each model's template with a fixed date; skip the test if a package is missing."""
    folders = {name: package(name) / folder for name, folder in (_TRL, _AXOLOTL)}
    read = {
        model: Path(folders[name], f"{file}.jinja").read_text()
        for model, ((name, _), file) in _FILES.items()
    }
    read["dated"] = Path(__file__).with_name("dated.jinja").read_text()
    return {
        model: freeze_date(ChatTemplate(template, "<s>", "</s>")).source
        for model, template in read.items()
    }


def read_smollm3() -> dict[str, str]:
    """Return SmolLM3's template, with a fixed date; skip the test if there is no network."""

    def make(folder: Path) -> None:
        try:
            with urllib.request.urlopen(_SMOLLM3, timeout=20) as answer:
                found = answer.read()
        except OSError as error:
            pytest.skip(f"{_SMOLLM3} cannot be read: {error}")
        folder.mkdir()
        (folder / "sft.yaml").write_bytes(found)

    recipe = (kept_environment("smollm3", (_SMOLLM3,), make) / "sft.yaml").read_bytes()
    assert hashlib.sha256(recipe).hexdigest() == _SMOLLM3_SHA256
    source = yaml.safe_load(recipe)["chat_template"]
    return {"smollm3": freeze_date(ChatTemplate(source, "<s>", "</s>")).source}


def call(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(content: Any, number: int = 1, name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city <now> & soon.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}},
                "required": ["city"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Is it raining in Köln?"}
REPLY = {"role": "assistant", "content": "No, it is dry."}
CALL = {"role": "assistant", "content": "", "tool_calls": [call("weather", city="Köln")]}
SEVERAL = [call("weather", city="Köln"), call("weather", 2, city="Bonn", days=[1, 2])]
RESULT = result('{"rain": false}')
# By name: messages, and further arguments of apply_chat_template.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([SYSTEM, USER, REPLY, USER, REPLY], {}),
    "tools": ([USER, REPLY], {"tools": TOOLS}),
    "tools and a system prompt": ([SYSTEM, USER, REPLY], {"tools": TOOLS}),
    "a call is the reply": ([USER, CALL], {"tools": TOOLS}),
    "a call with null content": ([USER, {**CALL, "content": None}], {"tools": TOOLS}),
    "a call with words": ([USER, {**CALL, "content": "I look."}], {"tools": TOOLS}),
    "a result and a reply": ([SYSTEM, USER, CALL, RESULT, REPLY], {"tools": TOOLS}),
    "without the tools": ([USER, CALL, RESULT, REPLY], {}),
    "several calls": (
        [
            USER,
            {**CALL, "tool_calls": SEVERAL},
            RESULT,
            result("dry", 2),
            REPLY,
        ],
        {"tools": TOOLS},
    ),
    "calls one after the other": (
        [USER, CALL, RESULT, {**CALL, "tool_calls": [SEVERAL[1]]}, result("dry", 2), REPLY],
        {"tools": TOOLS},
    ),
    "reasoning": ([USER, {**REPLY, "reasoning_content": "Look it up."}], {}),
    "reasoning before": ([USER, {**REPLY, "reasoning_content": "Hm."}, USER, REPLY], {}),
    "reasoning and a call": ([USER, {**CALL, "reasoning_content": "Hm."}], {"tools": TOOLS}),
    "parts": (
        [
            {"role": "user", "content": [{"type": "text", "text": "Is it raining"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        ],
        {},
    ),
    "developer": ([{"role": "developer", "content": "Be brief."}, USER, REPLY], {}),
    "documents": ([USER, REPLY], {"documents": [{"title": "Rain", "text": "None."}]}),
}
