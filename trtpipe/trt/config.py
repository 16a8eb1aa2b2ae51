"""The job's builder options set on a TensorRT builder config, by name, never by number.

What a release cannot do has been refused before (`options.refusals`); here every option that was asked for is set, and
TensorRT's own objections are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from trtpipe.batching import by_profile
from trtpipe.errors import InputError
from trtpipe.job.globs import matching
from trtpipe.job.sections import Build
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.options import asked
from trtpipe.values import TensorSpec
from trtpipe.version_numbers import sm

if TYPE_CHECKING:
    from trtpipe.trt.types import Builder, IBuilderConfig, INetworkDefinition, IOptimizationProfile

T = TypeVar("T")

#: Options that are one builder flag each.
FLAGS = {
    "editable_timing_cache": "EDITABLE_TIMING_CACHE",
    "error_on_timing_cache_miss": "ERROR_ON_TIMING_CACHE_MISS",
    "sparse_weights": "SPARSE_WEIGHTS",
    "strict_nans": "STRICT_NANS",
    "direct_io": "DIRECT_IO",
    "version_compatible": "VERSION_COMPATIBLE",
    "exclude_lean_runtime": "EXCLUDE_LEAN_RUNTIME",
    "strip_plan": "STRIP_PLAN",
    "weight_streaming": "WEIGHT_STREAMING",
    "gpu_fallback": "GPU_FALLBACK",
}
_REFIT_FLAGS = {"all": "REFIT", "identical": "REFIT_IDENTICAL", "individual": "REFIT_INDIVIDUAL"}
#: Options that are one attribute of the config each, their values taken as they are.
ATTRIBUTES = {
    "optimization_level": "builder_optimization_level",
    "l2_limit_for_tiling": "l2_limit_for_tiling",
    "max_num_tactics": "max_num_tactics",
    "avg_timing_iterations": "avg_timing_iterations",
    "max_aux_streams": "max_aux_streams",
    "dla_core": "DLA_core",
}
#: Options that are one attribute holding an enum: (attribute, enum).
ENUMS = {
    "profiling_verbosity": ("profiling_verbosity", "ProfilingVerbosity"),
    "tiling_optimization_level": ("tiling_optimization_level", "TilingOptimizationLevel"),
    "hardware_compatibility": ("hardware_compatibility_level", "HardwareCompatibilityLevel"),
    "runtime_platform": ("runtime_platform", "RuntimePlatform"),
    "default_device_type": ("default_device_type", "DeviceType"),
}


def apply(flavour: Flavour, config: IBuilderConfig, network: INetworkDefinition, build: Build) -> None:
    """Set every option of `build` that is a setting of the config or of the network; profiles and caches are apart.

    Raises:
        InputError: when an option names a binding or layer that the network does not have.
    """
    trt, wanted = flavour.module, asked(build)
    for field, flag in FLAGS.items():
        if wanted.get(field):
            config.set_flag(getattr(trt.BuilderFlag, flag))
    if refit := _REFIT_FLAGS.get(build.refit):
        config.set_flag(getattr(trt.BuilderFlag, refit))
    (config.set_flag if build.tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    for field, attribute in ATTRIBUTES.items():
        if field in wanted:
            setattr(config, attribute, wanted[field])
    for field, (attribute, enum) in ENUMS.items():
        if field in wanted or field == "profiling_verbosity":
            setattr(config, attribute, getattr(getattr(trt, enum), getattr(build, field).upper()))
    if build.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, build.workspace)
    for pool, limit_bytes in build.memory_pools.items():
        config.set_memory_pool_limit(getattr(trt.MemoryPoolType, pool.upper()), limit_bytes)
    if build.tactic_sources is not None:
        config.set_tactic_sources(_mask(trt.TacticSource, build.tactic_sources))
    if build.compute_capability:
        config.num_compute_capabilities = len(build.compute_capability)
        for index, capability in enumerate(build.compute_capability):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm(capability)}"), index)
    _set_formats(trt, network, build)
    _place_layers(trt, config, network, build)


def add_profiles(
    flavour: Flavour, builder: Builder, config: IBuilderConfig, inputs: Sequence[TensorSpec], build: Build
) -> tuple[IOptimizationProfile, ...]:
    """The optimization profiles, added to `config`; () for static inputs. Keep them as long as the config.

    Raises:
        InputError: TensorRT does not accept one.
    """
    profiles = []
    for number, specs in enumerate(by_profile(inputs, build.profiles) if any(s.dynamic for s in inputs) else ()):
        profile = builder.create_optimization_profile()
        for spec in specs:
            if spec.dynamic:
                profile.set_shape(spec.name, spec.at("min"), spec.at("opt"), spec.at("max"))
        if config.add_optimization_profile(profile) == -1:
            dims = {name: spec.dims[name] for spec in specs for name in spec.dynamic}
            raise InputError(
                f"build.profiles[{number}]: {flavour.title} does not accept the profile ({dims}). "
                "Check its ranges against the model."
            )
        profiles.append(profile)
    return tuple(profiles)


def _mask(enum: object, names: Sequence[str]) -> int:
    return sum(1 << int(getattr(enum, name.upper())) for name in dict.fromkeys(names))


def _set_formats(trt: ModuleType, network: INetworkDefinition, build: Build) -> None:
    bindings = {t.name: t for t in _all(network.get_input, network.num_inputs)}
    bindings |= {t.name: t for t in _all(network.get_output, network.num_outputs)}
    for name, formats in build.tensor_formats.items():
        if name not in bindings:
            raise InputError(
                f"build.tensor_formats.{name}: must be a binding, {', '.join(bindings)} (got {name}). Correct the name."
            )
        bindings[name].allowed_formats = _mask(trt.TensorFormat, formats)


def _place_layers(trt: ModuleType, config: IBuilderConfig, network: INetworkDefinition, build: Build) -> None:
    """Put each layer on the device of the last glob that fits its module path."""
    if not build.device_types:
        return
    fitted = set()
    for layer in _all(network.get_layer, network.num_layers):
        for glob, device in build.device_types.items():
            if matching((glob,), module_path(layer.name)):
                fitted.add(glob)
                config.set_device_type(layer, getattr(trt.DeviceType, device.upper()))
    for glob in build.device_types:
        if glob not in fitted:
            raise InputError(
                f"build.device_types.{glob}: must fit the module path of a layer (got none of {network.num_layers}). "
                "`trtpipe inspect` lists the layers."
            )


def dla_fallback(
    flavour: Flavour, config: IBuilderConfig, network: INetworkDefinition, build: Build
) -> tuple[str, ...]:
    """A note that names the modules that a DLA was to run and cannot, in order; () without any.

    Raises:
        InputError: there are some, and build.gpu_fallback does not let the GPU run them.
    """
    dla = flavour.module.DeviceType.DLA
    placed = [x for x in _all(network.get_layer, network.num_layers) if config.get_device_type(x) == dla]
    left = [x for x in placed if not config.can_run_on_DLA(x)]
    if not left:
        return ()
    modules = ", ".join(dict.fromkeys(module_path(layer.name) for layer in left))
    if not build.gpu_fallback:
        raise InputError(
            f"build.gpu_fallback: must be true where DLA cannot run a layer (got false; it cannot run {modules}). "
            "Set it, or give them to the GPU with build.device_types."
        )
    return (f"DLA: {len(left)} of {len(placed)} layers run on the GPU: {modules}",)


def module_path(layer_name: str) -> str:
    """The source module path at the start of a layer's name; what an exporter added follows a slash or a space."""
    return layer_name.split("/", 1)[0].split(" ", 1)[0]


def _all(get: Callable[[int], T], count: int) -> list[T]:
    return [get(index) for index in range(count)]
