"""What the manager tells a worker about the host side of one transfer: which slots, and the job's ticket.

It crosses processes inside vLLM's scheduler output, which vLLM pickles, so it holds plain integers only.
"""

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass
class SlotsSpec(LoadStoreSpec):
    """The slots of one store or load.

    Attributes:
        ticket: grows by one a transfer; the worker publishes it in its share's `ended`.
        units: first unit of each chunk's slot, in the order of the keys (group after group).
        slots_per_group: how many of them belong to each group, in the order of `GPULoadStoreSpec.group_sizes`.
    """

    ticket: int
    units: list[int]
    slots_per_group: list[int]
