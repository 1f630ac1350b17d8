"""Settings of the data that a run learns from; a default lives here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_aligner.config.common import Overlong, require_positive


@dataclass
class DataPrefixConfig:
    """Files per split; several validation files are several validation sets."""

    train: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)


@dataclass
class DataConfig:
    """``format`` is ``auto`` or a name from ``data/formats/``; the rest shapes the contract.

    ``template`` is ``tokenizer`` (the tokenizer's own), a name from ``text/templates.py``, or a
    file. Where it, ``add_bos`` or ``add_eos`` is null, the reward model that training starts from
    decides, and for a base model its tokenizer. ``allow_prompt_overlap`` lets a prompt stand in
    training and validation files both.
    """

    data_prefix: DataPrefixConfig = field(default_factory=DataPrefixConfig)
    format: str = "auto"
    seq_length: int = 1024
    overlong: Overlong = Overlong.drop
    template: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    allow_prompt_overlap: bool = False

    def __post_init__(self) -> None:
        require_positive("model.data", self, "seq_length")


@dataclass
class RegressionConfig:
    """``attributes`` names the label columns, in the order of ``label`` lists."""

    attributes: list[str] = field(default_factory=list)
    loss_mask_val: float = -100.0
