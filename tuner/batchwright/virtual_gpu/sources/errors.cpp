// Names and texts of errors, as cudaGetErrorName, cudaGetErrorString, cuGetErrorName and cuGetErrorString return them.
#include "virtual_gpu.h"

namespace virtual_gpu {

namespace {
constexpr int kNotReady = 600, kUnknown = 999;

constexpr ErrorText kErrors[] = {
    {kSuccess, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kInvalidConfiguration, "cudaErrorInvalidConfiguration", "CUDA_ERROR_INVALID_VALUE",
     "invalid configuration argument"},
    {kDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {kNoDevice, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kEccUncorrectable, "cudaErrorECCUncorrectable", "CUDA_ERROR_ECC_UNCORRECTABLE",
     "uncorrectable ECC error encountered"},
    {kInvalidHandle, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotReady, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {kNotSupported, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kUnknown, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"},
};
}  // namespace

const ErrorText &error_text(int number) {
  for (const ErrorText &error : kErrors)
    if (error.number == number) return error;
  return kErrors[std::size(kErrors) - 1];
}

}  // namespace virtual_gpu
