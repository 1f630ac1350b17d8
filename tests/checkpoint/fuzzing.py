"""Changes to a checkpoint's files, and what has to come of each: a model, or one error of ours."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, load_reward_model
from nemo_aligner.config.common import Precision
from nemo_aligner.utils.errors import AlignerError
from tests.harness import tiny

SECONDS = 60
MEMORY = 2**31  # memory that a case may use in addition to that of the process
SHOWN = 4000  # characters of an error
TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# YAML of a few lines whose aliases expand to billions of items ("billion laughs").
LAUGHS = "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]" for n in range(12)
)
BOMB = "executed"  # a file that only untrusted code would create
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
NASTY = [
    None, True, False, 0, 1, -1, 2, 3, 2.5, 1e-320, 1e308, float("nan"), float("inf"), 10**12,
    2**63, 10**400, "", "text", "3", "x" * 100_000, "\x00", "\ud800", "../../etc", "/etc/hostname",
    [], [1, 2], [None], {}, {"a": "b"}, DEEP,
]  # fmt: skip
# Expressions by which a template would reach Python objects that it must not reach.
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
LOOP = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
TEMPLATES = [
    "", ESCAPE, LOOP, tiny.CHATML * 2000, tiny.CHATML + "x" * 2_000_000, "{% for %}", "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}", "{{ messages[9].content.x }}", "{{ 'a' * 10 ** 11 }}",
    "{{ 9 ** (9 ** (9 ** 9)) }}", "{{ strftime_now('%d') }}", "{% include '/etc/hostname' %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ '%0999999999999d' % 1 }}",
    "{" * 5000, "{{ " + "(" * 5000 + " }}", "\ud800", tiny.CHATML + "\ud800", "{% set a = 1 %}",
    "{% if " + "not " * 5000 + "a %}{% endif %}", "{{ range(10 ** 9) }}",
    "{{ messages.append(1) }}", "{% for m in messages %}" * 30 + "x" + "{% endfor %}" * 30,
]  # fmt: skip
Files = dict[str, bytes]
Make = Callable[[Files, random.Random], Files]
ALL = ("config", "weights", "tokenizer")  # all fields of Content


class TooLong(BaseException):
    """Raised when a case takes too long; its type is never caught as an error of a file."""


@dataclass(frozen=True)
class Content:
    """Content of a loaded archive, for comparison."""

    config: str
    weights: str
    tokenizer: str


@dataclass(frozen=True)
class Mutation:
    """A kind of damage: ``make`` damages the files, ``alters`` names content that may change."""

    make: Make
    alters: tuple[str, ...] = ()


def load(path: Path, layout: Any) -> Content:
    """Load the content of a base model, or of a reward model with its contract."""
    with open_nemo(path, with_weights=False) as folder:
        contract = folder.contract
    if contract is None:
        loaded: Any = load_pretrained(path, layout, num_attributes=1, precision=Precision.fp32)
    else:
        loaded = load_reward_model(path, layout, Precision.fp32)
    digest = hashlib.sha256()
    for name, parameter in loaded.model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    config = repr((loaded.config, contract))
    return Content(config, digest.hexdigest(), loaded.tokenizer.fingerprint)


def some_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, remove or duplicate a few bytes, or cut off the end."""
    if not data:
        return b"\x80"
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 1, 2, 8, 512]))
    action = rng.randrange(4)
    if action == 0:
        flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[start:end])
        return data[:start] + flipped + data[end:]
    if action == 1:
        return data[:start] + data[end:]
    if action == 2:
        return data[:end] + data[start:]
    return data[:start]


def with_nasty_value(content: Any, rng: random.Random) -> Any:
    """Change or remove one value, key or item in JSON or YAML data."""
    changed = copy.deepcopy(content)
    part = changed
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        if not keys:
            return rng.choice(NASTY)
        key = rng.choice(keys)
        if not isinstance(part[key], dict | list) or rng.random() < 0.3:
            break
        if not part[key]:
            break
        part = part[key]
    action = rng.randrange(8)
    if action == 0:
        del part[key]
    elif action == 1 and isinstance(part, dict):
        part[rng.choice(["", "x", "\ud800", "__class__", "0"])] = part.pop(key)
    elif action == 2:
        other = rng.choice(keys)
        part[key], part[other] = part[other], part[key]
    else:
        part[key] = rng.choice(NASTY)
    return changed


def edited(files: Files, name: str, change: Callable[[bytes], bytes]) -> Files:
    return {**files, name: change(files[name])}


def files_of(folder: Path) -> Files:
    """Read every file below ``folder``, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def text_of(value: Any) -> bytes:
    return json.dumps(value).encode()


def damage(*endings: str) -> Make:
    """Build a mutation that damages bytes of a file whose name ends with one of ``endings``."""

    def some_bytes_of(files: Files, rng: random.Random) -> Files:
        name = rng.choice([name for name in files if name.endswith(endings)])
        return edited(files, name, lambda data: some_bytes(data, rng))

    some_bytes_of.__name__ += f" {endings}"
    return some_bytes_of


def two_files(files: Files, rng: random.Random) -> Files:
    """Remove a file, copy it under another name, or swap the contents of two files."""
    first, second = rng.sample(sorted(files), 2)
    action = rng.randrange(3)
    if action == 0:
        return {name: data for name, data in files.items() if name != first}
    if action == 1:
        return {**files, first: files[second], second: files[first]}
    other = rng.choice(["x.safetensors", "model.safetensors", "special_tokens_map.json", "x.py"])
    return {**files, other: files[first]}


@dataclass(frozen=True)
class Damaged:
    """The files of a checkpoint, what is done to them, and the way in.

    ``source`` is the part of them that ``convert`` is given; None: that is opened as it is.
    """

    files: Files
    mutations: Sequence[Mutation]
    convert: Callable[[Path, Path], Any] | None
    source: str = "."


class Fuzzer:
    """Opens mutated checkpoints in ``folder``, and checks the results."""

    def __init__(self, damaged: Damaged, layout: Any, folder: Path, scratch: Path) -> None:
        self._damaged, self._layout = damaged, layout
        self._folder, self._scratch = folder, scratch
        self._wanted = self._content(damaged.files)
        assert isinstance(self._wanted, Content), self._wanted

    def check(self, seeds: range) -> None:
        """Check the mutation of every seed; some must be loaded, and some refused."""
        mutations = self._damaged.mutations
        loaded = sum(self._is_loaded(mutations[seed % len(mutations)], seed) for seed in seeds)
        least = len(seeds) // 50
        assert least < loaded < len(seeds) - least, f"{loaded} of {len(seeds)} loaded"

    def _is_loaded(self, mutation: Mutation, seed: int) -> bool:
        """Tell if the mutated files were loaded; fail for any result that is not allowed."""
        rng = random.Random(seed)
        what = f"{mutation.make.__name__}, seed {seed}"
        files = mutation.make(self._damaged.files, rng)
        try:
            with limited():
                content = self._content(files)
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:500]}") from error
        assert not Path(BOMB).exists(), f"{what}: it ran code"
        if isinstance(content, str):
            # If an archive is damaged inside, the error may name the folder into which it was
            # unpacked.
            places = [self._folder] if self._damaged.convert else [self._folder, self._scratch]
            is_named = any(str(place) in content for place in places)
            assert is_named, f"{what}: the error names no file: {content[:500]}"
            assert len(content) < SHOWN, (
                f"{what}: {len(content)} characters of error: {content[:500]}"
            )
            return False
        for part in ALL:
            if part not in mutation.alters:
                expected = getattr(self._wanted, part)
                assert getattr(content, part) == expected, f"{what}: it loads with another {part}"
        return True

    def _content(self, files: Files) -> Content | str:
        """Return the content of ``files``, or the error; check that no files are left over."""
        shutil.rmtree(self._folder, ignore_errors=True)
        source, output = self._folder / "theirs", self._folder / "out" / "ours.nemo"
        write_files(source, files)
        files_before = sorted(self._folder.rglob("*"))
        convert, argument = self._damaged.convert, source / self._damaged.source
        try:
            if convert is None:
                return load(argument, self._layout)
            convert(argument, output)
        except AlignerError as error:
            left = [path for path in self._folder.rglob("*") if path not in files_before]
            assert not [path for path in left if path != output.parent], f"it left {left}"
            if caused_by_memory(error):
                raise MemoryError(str(error)) from error
            return str(error)
        finally:
            # torch creates a folder for its compiler at its first use, which does not count.
            names = [path.name for path in self._scratch.iterdir()]
            assert all(name.startswith("torchinductor") for name in names), f"it left {names}"
        assert sorted(output.parent.iterdir()) == [output]
        return load(output, self._layout)


def caused_by_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def limited() -> Iterator[None]:
    """Limit time to a minute and memory to a little; exceeding either raises an exception."""

    def stop(*unused: Any) -> None:
        raise TooLong(f"longer than {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard_limit = limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard_limit))
    previous_handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
