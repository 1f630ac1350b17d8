"""A stand-in for TransformerEngine (2.7 to 2.20): its signatures, computed by torch.

It checks how this project calls it. Names that megatron-core imports but no model of this project
uses are empty.
"""

import sys
from contextlib import nullcontext
from types import ModuleType

from transformer_engine import pytorch

__version__ = "2.7.0"

_CLASSES = {
    "common.recipe": "Format Recipe DelayedScaling Float8CurrentScaling Float8BlockScaling "
    "MXFP8BlockScaling",
    "pytorch.distributed": "CudaRNGStatesTracker checkpoint",
    "pytorch.float8_tensor": "Float8Tensor",
    "pytorch.fp8": "",
    "pytorch.router": "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss "
    "fused_topk_with_score_function",
    "pytorch.tensor": "QuantizedTensor",
    "pytorch.tensor.float8_tensor": "Float8Tensor",
    "pytorch.tensor.mxfp8_tensor": "MXFP8Tensor",
    "pytorch.tensor.utils": "replace_raw_data cast_master_weights_to_fp8 "
    "post_all_gather_processing",
}


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _module(name: str) -> ModuleType:
    """The module ``name``; it and its parents are made if they do not exist."""
    if name not in sys.modules:
        around, _, last_name = name.rpartition(".")
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = []
        setattr(_module(around), last_name, module)
    return sys.modules[name]


for _name, _classes in _CLASSES.items():
    for _class in _classes.split():
        setattr(_module(f"{__name__}.{_name}"), _class, type(_class, (), {}))
_fp8 = _module(f"{__name__}.pytorch.fp8")
_fp8.FP8GlobalStateManager, _fp8.fp8_autocast = FP8GlobalStateManager, nullcontext
_module(f"{__name__}.pytorch.distributed").activation_recompute_forward = nullcontext
pytorch.fp8_model_init = nullcontext
