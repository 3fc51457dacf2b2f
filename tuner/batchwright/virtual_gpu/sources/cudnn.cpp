// cuDNN: descriptors keep what is needed to answer questions about them, one engine supports every graph, and nothing is
// computed. All other calls are generated stubs that succeed, but for those that have to answer: they are not supported.
#include <cudnn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include "virtual_gpu.h"

using namespace virtual_gpu;

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

EXPORT size_t cudnnGetVersion() { return CUDNN_VERSION; }
EXPORT size_t cudnnGetMaxDeviceVersion() { return CUDNN_MAX_DEVICE_VERSION; }
EXPORT size_t cudnnGetCudartVersion() { return CUDART_VERSION; }

EXPORT cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
  *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT const char *cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS           ? "CUDNN_STATUS_SUCCESS"
         : status == CUDNN_STATUS_NOT_INITIALIZED ? "CUDNN_STATUS_NOT_INITIALIZED"
         : status == CUDNN_STATUS_NOT_SUPPORTED   ? "CUDNN_STATUS_NOT_SUPPORTED"
                                                  : "unknown status";
}

EXPORT void cudnnGetLastErrorString(char *message, size_t capacity) {
  if (capacity > 0) *message = '\0';
}

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  if (require_current_context() != kSuccess) return CUDNN_STATUS_NOT_INITIALIZED;
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
  *stream = handle->stream;
  return CUDNN_STATUS_SUCCESS;
}

// --- descriptors that are only made and destroyed ---

#define OPAQUE_DESCRIPTOR(kind)                                                             \
  struct cudnn##kind##Struct {};                                                            \
  EXPORT cudnnStatus_t cudnnCreate##kind##Descriptor(cudnn##kind##Descriptor_t *created) {  \
    *created = new cudnn##kind##Struct;                                                     \
    return CUDNN_STATUS_SUCCESS;                                                            \
  }                                                                                         \
  EXPORT cudnnStatus_t cudnnDestroy##kind##Descriptor(cudnn##kind##Descriptor_t destroyed) { \
    delete destroyed;                                                                       \
    return CUDNN_STATUS_SUCCESS;                                                            \
  }
OPAQUE_DESCRIPTOR(Activation)
OPAQUE_DESCRIPTOR(Convolution)
OPAQUE_DESCRIPTOR(Filter)
OPAQUE_DESCRIPTOR(Pooling)
OPAQUE_DESCRIPTOR(Dropout)
OPAQUE_DESCRIPTOR(CTCLoss)
OPAQUE_DESCRIPTOR(SpatialTransformer)

// --- tensors ---

struct cudnnTensorStruct {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::vector<int> sizes, strides;
};

EXPORT cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t *tensor) {
  *tensor = new cudnnTensorStruct;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t tensor) {
  delete tensor;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t tensor, cudnnDataType_t type, int dimensions,
                                                const int sizes[], const int strides[]) {
  *tensor = {type, {sizes, sizes + dimensions}, {strides, strides + dimensions}};
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t tensor, int capacity,
                                                cudnnDataType_t *type, int *dimensions, int sizes[], int strides[]) {
  const size_t copied = std::min<size_t>(capacity, tensor->sizes.size());
  *type = tensor->type;
  *dimensions = static_cast<int>(tensor->sizes.size());
  std::copy_n(tensor->sizes.begin(), copied, sizes);
  std::copy_n(tensor->strides.begin(), copied, strides);
  return CUDNN_STATUS_SUCCESS;
}

// --- sizes of workspaces: none is known, but for the states of dropout ---

namespace {
// An assumption: a generator of 48 bytes (curandStateXORWOW_t) for each resident thread.
constexpr size_t kDropoutStateBytes = 48;

cudnnStatus_t no_bytes(size_t *bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
}  // namespace

EXPORT cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t *bytes) {
  const Gpu *gpu = visible_gpu(current_ordinal());
  *bytes = gpu->multiprocessors * gpu->threads_per_multiprocessor * kDropoutStateBytes;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t *bytes) {
  return no_bytes(bytes);
}

EXPORT cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t *bytes) {
  return no_bytes(bytes);
}

EXPORT cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, cudnnBatchNormMode_t,
                                                                          cudnnBatchNormOps_t,
                                                                          const cudnnActivationDescriptor_t,
                                                                          const cudnnTensorDescriptor_t,
                                                                          size_t *bytes) {
  return no_bytes(bytes);
}

// --- the graph API: a descriptor holds what it is given ---

namespace {
struct AttributeValue {
  int64_t count = 0;
  std::vector<char> bytes;
};

struct BackendDescriptor {
  std::map<int, AttributeValue> attributes;
};

BackendDescriptor *backend(cudnnBackendDescriptor_t descriptor) { return static_cast<BackendDescriptor *>(descriptor); }

size_t element_bytes(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_FRACTION: return 16;
    default: return 4;
  }
}

// The attributes that the library sets itself: the text or the number of each; nothing for the others.
struct Answer {
  bool is_known = false;
  int64_t count = 0;           // elements, which may exceed those copied
  std::string bytes;
};

Answer number(int64_t value) { return {true, 1, {reinterpret_cast<const char *>(&value), sizeof value}}; }

Answer answer_of_library(cudnnBackendAttributeName_t name) {
  switch (name) {
    // The caller's own descriptor, which is passed in, stands for the result.
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
    case CUDNN_ATTR_ENGINECFG_ENGINE: return {true, 1, {}};
    case CUDNN_ATTR_ENGINECFG_INTERMEDIATE_INFO:
    case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES:
    case CUDNN_ATTR_ENGINE_KNOB_INFO:
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
    case CUDNN_ATTR_ENGINE_LAYOUT_INFO:
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE: return {true, 0, {}};
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: return number(visible_gpu(current_ordinal())->cudnn_workspace_bytes);
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED:
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: return number(0);
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: return number(1);
    case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION: return {true, 3, std::string("{}\0", 3)};
    default: return {};
  }
}
}  // namespace

EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *descriptor) {
  *descriptor = new BackendDescriptor;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete backend(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

EXPORT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t count, const void *elements) {
  AttributeValue &value = backend(descriptor)->attributes[name];
  value = {count, {}};
  const auto *first = static_cast<const char *>(elements);
  if (elements != nullptr && count > 0) value.bytes.assign(first, first + count * element_bytes(type));
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                              cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                              int64_t capacity, int64_t *count, void *elements) {
  Answer answer = answer_of_library(name);
  if (!answer.is_known) {
    const auto found = backend(descriptor)->attributes.find(name);
    if (found == backend(descriptor)->attributes.end()) {
      log_once("unknown cuDNN attribute", std::to_string(static_cast<int>(name)));
    } else {
      answer = {true, found->second.count, {found->second.bytes.begin(), found->second.bytes.end()}};
    }
  }
  if (count != nullptr) *count = answer.count;
  const size_t room = capacity > 0 ? static_cast<size_t>(capacity) * element_bytes(type) : 0;
  if (elements != nullptr) memcpy(elements, answer.bytes.data(), std::min(room, answer.bytes.size()));
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return launch() == kSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}
