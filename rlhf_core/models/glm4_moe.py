"""GLM-4.5 to 4.7: experts in groups behind a sigmoid router, a shared expert, and dense layers before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.models.hf_config import ConfigFields

DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
WEIGHT_NAMES = {
    f"layers.mlp.shared_expert.{part}": f"model.layers.{{layer}}.mlp.shared_experts.{part}"
    for part in ("gate_proj", "up_proj", "down_proj")
}


def details(read: ConfigFields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    dense = min(read.whole("first_k_dense_replace", least=0), layers)
    experts, size = read.whole("n_routed_experts"), read.whole("moe_intermediate_size")
    groups, allowed = read.whole("n_group"), read.whole("topk_group")
    if experts % groups or allowed > groups:
        read.problem(
            f"n_group {groups} must divide n_routed_experts {experts}, and topk_group {allowed} be at most it"
        )
    further = range(layers, layers + read.whole("num_nextn_predict_layers", 0, least=0))
    plain = {"experts": 0, "experts_per_token": 0, "intermediate_size": read.whole("intermediate_size")}
    return {
        "intermediate_size": size,
        "experts": experts,
        "experts_per_token": read.whole("num_experts_per_tok"),
        "router": "sigmoid",
        "expert_groups": (groups, allowed),
        "expert_scale": read.positive("routed_scaling_factor") or 1.0,
        "shared_size": size * read.whole("n_shared_experts", 0, least=0),
        "qk_norm": "head" if read.switch("use_qk_norm") else None,
        "kinds": ("dense",) * dense + ("experts",) * (layers - dense),
        "carried": tuple(rf"model\.layers\.{i}\." for i in further),  # layers that predict further tokens
        "variants": (("dense", tuple(plain.items())),),
    }
