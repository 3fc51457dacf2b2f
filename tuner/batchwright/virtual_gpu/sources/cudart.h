// Shared by the files of libcudart.
#pragma once

#include <cuda_runtime_api.h>

#include "virtual_gpu.h"

// The status as an error, which becomes this thread's last error if it is one.
cudaError_t result(int status);

// Return the status of a call that failed from the function around it.
#define REQUIRE(call)                                                     \
  do {                                                                    \
    if (const virtual_gpu::Status failed = (call)) return result(failed); \
  } while (false)
