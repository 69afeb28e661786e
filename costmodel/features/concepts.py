"""The features, grouped by concepts that somebody who writes kernels would use."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

OTHER = "everything else"
"""The concept of a feature that no other one claims."""

FEATURES_OF = {
    "the size and type of the product": """
        log_m log_n log_k log_flops log_bytes balance small_m a_align b_align c_align a_layout
        b_layout c_layout is_bfloat16 item_bytes out_bytes tf32 wide bias activation
    """,
    "the device": "arch sm_count machine_balance l2_mib",
    "which kernel it is": """
        is_pointer is_tma is_persistent is_warp_specialized flatten repack repack_share
    """,
    "the shape of the tile": """
        block_m block_n block_k tile_intensity rows_per_warp wgmma_shape
        accumulators_per_thread stored_n halves
    """,
    "the bounds and the estimate on paper": """
        compute_bound dram_bound l2_bound bound estimate log_estimate roofline_us loop_share
        dram_estimate
    """,
    "the tail of the last wave": """
        tiles_per_sm waves wave_efficiency last_wave sm_balance tail_share
    """,
    "how many blocks there are": "tiles_m tiles_n tiles programs",
    "padding of the tiles": "useful_m useful_n useful_k useful even_k",
    "the pipeline: stages and bytes in flight": """
        num_stages bytes_in_flight stages_per_step steps steps_per_program
    """,
    "traffic, and reuse in L2": """
        group_m group_fill wave_footprint_l2 operand_traffic dram_traffic program_bytes
        dram_share a_straddle b_straddle c_straddle
    """,
    "blocks and warps that share a multiprocessor": """
        num_warps occupancy warps_per_sm resident shared_used shared_bytes static_shared_bytes
    """,
    "splitting k": "split_k split_traffic split_share",
    "registers and spills": "registers registers_used spill_bytes maxnreg",
    "the instructions of the main loop": """
        has_loop steps_per_iteration mma_per_iteration issue_bound issue_over_compute
    """,
    "the instructions outside the main loop": "outside_loop",
}  # fmt: skip
"""Features by the concept that claims them by name."""

_PREFIXES = {
    "step_": "the pipeline: stages and bytes in flight",
    "split_": "splitting k",
    "wave": "the tail of the last wave",
    "loop": "the instructions of the main loop",
    "all_": "the instructions outside the main loop",
    "score_": "the instructions outside the main loop",
    "reg_": "registers and spills",
}  # for features that are many, and for those not listed yet

CONCEPTS = (*FEATURES_OF, OTHER)
"""All concepts, in the order in which they are shown."""

_CONCEPT = {name: concept for concept, names in FEATURES_OF.items() for name in names.split()}


def concept_of(feature: str) -> str:
    """The concept that a feature belongs to; :data:`OTHER` where none claims it."""
    if feature in _CONCEPT:
        return _CONCEPT[feature]
    return next(
        (concept for start, concept in _PREFIXES.items() if feature.startswith(start)), OTHER
    )


def grouped(features: Sequence[str], values: Sequence[float]) -> Mapping[str, float]:
    """The sum of the values of each concept that occurs, in the order of :data:`CONCEPTS`."""
    sums = defaultdict[str, float](float)
    for feature, value in zip(features, values):
        sums[concept_of(feature)] += float(value)
    return {concept: sums[concept] for concept in CONCEPTS if concept in sums}
