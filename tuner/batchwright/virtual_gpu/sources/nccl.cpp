// NCCL: every rank keeps its own contribution. The memory is that of a run with several ranks; the values are those of a
// rank whose peers contribute the same to a gather, and nothing to a sum. No rank waits for another.
#include <nccl.h>

#include "virtual_gpu.h"

using namespace virtual_gpu;

struct ncclComm {
  int ranks, rank, device;
};

namespace {
size_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    default: return 1;
  }
}

ncclResult_t create(ncclComm_t *communicator, int ranks, int rank) {
  if (require_current_context() != kSuccess) return ncclUnhandledCudaError;
  *communicator = new ncclComm{ranks, rank, current_ordinal()};
  return ncclSuccess;
}

ncclResult_t keep(const void *source, void *destination, size_t count, ncclDataType_t type) {
  if (require_current_context() != kSuccess) return ncclUnhandledCudaError;
  if (destination != nullptr && source != destination) copy(destination, source, count * element_bytes(type));
  return ncclSuccess;
}
}  // namespace

EXPORT ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  *id = {};
  return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t error) {
  return error == ncclSuccess ? "no error" : "unhandled cuda error";
}
EXPORT const char *ncclGetLastError(ncclComm_t) { return ""; }

// --- communicators ---

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int ranks, ncclUniqueId, int rank) {
  return create(communicator, ranks, rank);
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int ranks, ncclUniqueId, int rank,
                                           ncclConfig_t *) {
  return create(communicator, ranks, rank);
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *communicator, int ranks, int rank, int, ncclUniqueId *,
                                             ncclConfig_t *) {
  return create(communicator, ranks, rank);
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t communicator, int, int, ncclComm_t *result, ncclConfig_t *) {
  *result = new ncclComm(*communicator);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete communicator;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t communicator) { return ncclCommDestroy(communicator); }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

EXPORT ncclResult_t ncclCommCount(const ncclComm_t communicator, int *count) {
  *count = communicator->ranks;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int *rank) {
  *rank = communicator->rank;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t communicator, int *device) {
  *device = communicator->device;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclMemAlloc(void **address, size_t bytes) {
  return allocate(current_ordinal(), bytes, address) == kSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

EXPORT ncclResult_t ncclMemFree(void *address) {
  return deallocate(address) == kSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// --- collectives ---

EXPORT ncclResult_t ncclAllReduce(const void *source, void *destination, size_t count, ncclDataType_t type, ncclRedOp_t,
                                  ncclComm_t, cudaStream_t) {
  return keep(source, destination, count, type);
}

EXPORT ncclResult_t ncclReduce(const void *source, void *destination, size_t count, ncclDataType_t type, ncclRedOp_t,
                               int, ncclComm_t, cudaStream_t) {
  return keep(source, destination, count, type);
}

EXPORT ncclResult_t ncclBroadcast(const void *source, void *destination, size_t count, ncclDataType_t type, int,
                                  ncclComm_t, cudaStream_t) {
  return keep(source, destination, count, type);
}

EXPORT ncclResult_t ncclAllGather(const void *source, void *destination, size_t count, ncclDataType_t type,
                                  ncclComm_t communicator, cudaStream_t) {
  for (int rank = 0; rank < communicator->ranks; ++rank) {
    void *part = static_cast<char *>(destination) + rank * count * element_bytes(type);
    if (const ncclResult_t error = keep(source, part, count, type)) return error;
  }
  return ncclSuccess;
}

EXPORT ncclResult_t ncclReduceScatter(const void *source, void *destination, size_t count, ncclDataType_t type,
                                      ncclRedOp_t, ncclComm_t communicator, cudaStream_t) {
  const void *part = static_cast<const char *>(source) + communicator->rank * count * element_bytes(type);
  return keep(part, destination, count, type);
}
