// Device attributes. What is no figure of the description is the same on all GPUs of compute capability 7.0 and later
// (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"), or says that the virtual card lacks a
// feature. cudaDeviceGetAttribute and cuDeviceGetAttribute number the attributes alike.
#include <driver_types.h>

#include <climits>

#include "virtual_gpu.h"

namespace virtual_gpu {

namespace {
constexpr int kMaxThreadsPerBlock = 1024, kMaxBlockDimZ = 64, kMaxGridDimYZ = 65535;
constexpr int kSharedMemoryPerBlock = 48 << 10, kReservedSharedMemoryPerBlock = 1 << 10;  // without opting in
constexpr int kRegisters = 65536, kConstantMemory = 65536, kWarpSize = 32;

// Named by cuda.h alone: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and the kinds of its handles.
constexpr int kVirtualMemoryManagement = 102, kPosixFileHandles = 103, kFabricHandles = 128;

std::optional<int> figure(int number, const Gpu &gpu, int pci_bus) {
  switch (number) {
    case cudaDevAttrClockRate: return gpu.clock_khz;
    case cudaDevAttrMultiProcessorCount: return gpu.multiprocessors;
    case cudaDevAttrPciBusId: return pci_bus;
    case cudaDevAttrL2CacheSize: return gpu.l2_cache_bytes;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return gpu.threads_per_multiprocessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return gpu.blocks_per_multiprocessor;
    case cudaDevAttrComputeCapabilityMajor: return gpu.compute_capability_major;
    case cudaDevAttrComputeCapabilityMinor: return gpu.compute_capability_minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return gpu.shared_memory_per_multiprocessor_bytes;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return gpu.shared_memory_per_block_bytes;
    case cudaDevAttrClusterLaunch: return gpu.compute_capability_major >= 9;
    default: return std::nullopt;
  }
}

std::optional<int> common_limit(int number) {
  switch (number) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return kMaxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimZ: return kMaxBlockDimZ;
    case cudaDevAttrMaxGridDimX:
    case cudaDevAttrMaxPitch: return INT_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return kMaxGridDimYZ;
    case cudaDevAttrMaxSharedMemoryPerBlock: return kSharedMemoryPerBlock;
    case cudaDevAttrReservedSharedMemoryPerBlock: return kReservedSharedMemoryPerBlock;
    case cudaDevAttrTotalConstantMemory: return kConstantMemory;
    case cudaDevAttrWarpSize: return kWarpSize;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return kRegisters;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrTexturePitchAlignment: return 32;
    default: return std::nullopt;
  }
}

std::optional<int> feature(int number) {
  switch (number) {
    case cudaDevAttrGpuOverlap:
    case cudaDevAttrAsyncEngineCount:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case kVirtualMemoryManagement:
    case kPosixFileHandles: return 1;
    case cudaDevAttrKernelExecTimeout:
    case cudaDevAttrIntegrated:
    case cudaDevAttrComputeMode:
    case cudaDevAttrEccEnabled:
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrTccDriver:
    case cudaDevAttrIsMultiGpuBoard:
    case cudaDevAttrMultiGpuBoardGroupID:
    case cudaDevAttrHostNativeAtomicSupported:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrPageableMemoryAccessUsesHostPageTables:
    case cudaDevAttrDirectManagedMemAccessFromHost:
    case cudaDevAttrGPUDirectRDMASupported:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrMemoryPoolSupportedHandleTypes:
    case kFabricHandles: return 0;
    default: return std::nullopt;
  }
}
}  // namespace

std::optional<int> attribute(int number, int ordinal) {
  const int gpu = gpu_of_ordinal(ordinal);
  if (const auto value = figure(number, *gpu_at(gpu), 1 + gpu)) return value;
  if (const auto value = common_limit(number)) return value;
  return feature(number);
}

}  // namespace virtual_gpu
