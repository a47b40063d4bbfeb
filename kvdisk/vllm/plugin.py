"""vLLM's general plugin: makes `spec_name: KVDiskOffloadingSpec` known in every process, without a module path.

It also lets a wrong `block_size` fail with an explanation. vLLM translates that key before it asks any spec, and where
KV cache groups differ in block size it ends in an assertion that names neither the sizes nor the way out.

And it remembers vLLM's configuration for those to whom vLLM gives an extract only: a tier has to know whose KV it has.
"""

import logging
import sys
import weakref
from typing import Any

logger = logging.getLogger("kvdisk")

NAME = "KVDiskOffloadingSpec"

_configs: "dict[str, weakref.ref[Any]]" = {}


def config_of(engine_id: str) -> Any:
    """vLLM's configuration of an engine of this process; None if the plugin was not loaded before the engine."""
    reference = _configs.get(engine_id)
    return reference() if reference is not None else None


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once. Must not fail, and imports next to nothing."""
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        if NAME not in getattr(OffloadingSpecFactory, "_registry", {}):
            OffloadingSpecFactory.register_spec(NAME, "kvdisk.vllm", NAME)
        _explain_block_size()
    except Exception:
        logger.debug("kvdisk's plugin does not fit this vLLM; spec_module_path still works", exc_info=True)


def _remember(vllm_config: Any) -> None:
    """Without it a tier knows less, and says so; nothing here may keep the engine from starting."""
    try:
        _configs[str(vllm_config.kv_transfer_config.engine_id)] = weakref.ref(vllm_config)
    except (AttributeError, TypeError):
        logger.debug("vLLM's configuration cannot be kept", exc_info=True)


def _explain_block_size() -> None:
    """Check the key when the connector's module is loaded, which happens only where offloading is in use."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry: dict[str, Any] = KVConnectorFactory._registry
    load = registry.get("OffloadingConnector")
    if load is None or getattr(load, "by_kvdisk", False):
        return

    def load_checked() -> Any:
        connector = load()
        module: Any = sys.modules[connector.__module__]
        build = module.build_offloading_config
        if not getattr(build, "by_kvdisk", False):
            module.build_offloading_config = _checked(build)
        return connector

    load_checked.by_kvdisk = True  # type: ignore[attr-defined]
    registry["OffloadingConnector"] = load_checked


def _checked(build: Any) -> Any:
    def build_checked(vllm_config: Any, kv_cache_config: Any) -> Any:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        _remember(vllm_config)
        if extra.get("spec_name") == NAME:
            from kvdisk.vllm.config import check_block_size

            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            sizes = {group: spec.block_size for group, spec in enumerate(specs) if spec.prefix_cacheable}
            check_block_size(extra, sizes)
        return build(vllm_config, kv_cache_config)

    build_checked.by_kvdisk = True  # type: ignore[attr-defined]
    return build_checked
