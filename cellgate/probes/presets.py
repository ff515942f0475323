"""Rules for well-known exporters: faults that make a machine unable to compute, and no harmless ones.

A rule of growth may match once and not again: it makes a unit suspect and sends a canary now, and the node is
out only when the growth continues. A rule of state matches until the machine is repaired.
"""

from __future__ import annotations

# Xids that only a reset of the GPU or a restart of the machine clears, by NVIDIA's Xid catalog (its immediate
# action is RESET_GPU or RESTART_BM, or its trigger conditions say so):
# https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
# Not here: 63 (a row was remapped; ignore), 94 (contained; restart the application, which the gate sees),
# 109, 119, 120 (may pass), 136, 155, 156 (links switched off on purpose, events that can wait).
_FATAL_XIDS = (
    46,  # the GPU stopped processing
    48,  # double bit ECC error
    62,  # internal micro-controller halt
    64,  # remapping of memory failed
    74,  # NVLink error
    79,  # the GPU has fallen off the bus
    95,  # uncontained memory error
    110,  # security fault
    140,  # unrecovered ECC error
    143,  # the GPU cannot be initialised
    158,  # fatal timeout
)

PRESETS: dict[str, tuple[str, ...]] = {
    # dcgm-exporter. The gauge keeps the last Xid until the exporter or the driver starts anew, which these
    # Xids need anyway (github.com/NVIDIA/dcgm-exporter/issues/500, github.com/NVIDIA/DCGM/issues/277); but a
    # harmless Xid soon after hides a fatal one. The counter keeps each Xid for five minutes, where the
    # exporter is told to show it (github.com/NVIDIA/dcgm-exporter/pull/239).
    "dcgm": (
        *(f"DCGM_FI_DEV_XID_ERRORS == {xid}" for xid in _FATAL_XIDS),
        *(f'DCGM_EXP_XID_ERRORS_COUNT{{xid="{xid}"}} > 0' for xid in _FATAL_XIDS),
    ),
    # neuron-monitor-prometheus.py of the AWS Neuron tools creates these names; the types are those of the
    # Neuron Monitor user guide (error_summary, execution_summary, neuron_hw_counters).
    "neuron": (
        'increase(execution_errors_total{error_type="hardware"}) > 0',
        'increase(execution_status_total{status_type="timed_out"}) > 0',
        'increase(hardware_ecc_events_total{event_type="mem_ecc_uncorrected"}) > 0',
        'increase(hardware_ecc_events_total{event_type="sram_ecc_uncorrected"}) > 0',
    ),
    # node_exporter, from collectors that are on by default (filesystem, edac, vmstat, meminfo). The growth of
    # `readonly`, not its value: the root of some systems is read-only by design. Below 64 MiB little runs.
    "node": (
        "increase(node_filesystem_readonly) > 0",
        "increase(node_edac_uncorrectable_errors_total) > 0",
        "increase(node_vmstat_oom_kill) > 0",
        "node_memory_MemAvailable_bytes < 67108864",
    ),
}
