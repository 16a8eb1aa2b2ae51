"""TensorRT's classes by name, for annotations alone: importing this imports no TensorRT.

The module itself is known only at run time (`flavour.load`), and several releases differ: what a class has is what
`flavour.CAPABILITIES` says, and not what a type checker could know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorrt import Builder as Builder
    from tensorrt import IBuilderConfig as IBuilderConfig
    from tensorrt import ICudaEngine as ICudaEngine
    from tensorrt import IExecutionContext as IExecutionContext
    from tensorrt import IInt8Calibrator as IInt8Calibrator
    from tensorrt import ILayer as ILayer
    from tensorrt import ILogger as ILogger
    from tensorrt import INetworkDefinition as INetworkDefinition
    from tensorrt import IOptimizationProfile as IOptimizationProfile
    from tensorrt import IOutputAllocator as IOutputAllocator
    from tensorrt import IProfiler as IProfiler
    from tensorrt import IProgressMonitor as IProgressMonitor
    from tensorrt import IRuntimeCache as IRuntimeCache
    from tensorrt import IRuntimeConfig as IRuntimeConfig
    from tensorrt import ITensor as ITensor
    from tensorrt import ITimingCache as ITimingCache
    from tensorrt import OnnxParser as OnnxParser
    from tensorrt import ParserError as ParserError
    from tensorrt import Runtime as Runtime
