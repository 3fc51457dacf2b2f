// cuDNN: recurrent networks. Their weights lie in one buffer, of which torch makes its parameters views.
#include <cudnn.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "virtual_gpu.h"

struct cudnnRNNStruct {
  cudnnRNNMode_t mode = CUDNN_LSTM;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  int64_t inputs = 0, hidden = 0, outputs = 0;  // outputs: of the projection, if there is one, else `hidden`
  int64_t layers = 0, directions = 1;
  bool has_bias = true;
};

struct cudnnRNNDataStruct {
  int64_t samples = 0, tokens = 0;  // tokens: the steps of all samples
};

namespace {
struct Shape {
  int64_t rows, columns;
  int64_t elements() const { return rows * columns; }
};

int64_t gates(const cudnnRNNStruct &rnn) { return rnn.mode == CUDNN_LSTM ? 4 : rnn.mode == CUDNN_GRU ? 3 : 1; }

size_t element_bytes(cudnnDataType_t type) {
  return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_FLOAT ? 4 : 2;
}

// Matrices of a layer and direction ("pseudo layer"): one of each gate for the input, then for the state, then the
// projection (cuDNN API, cudnnGetRNNWeightParams).
int64_t matrix_count(const cudnnRNNStruct &rnn) { return 2 * gates(rnn) + (rnn.outputs < rnn.hidden ? 1 : 0); }

Shape matrix(const cudnnRNNStruct &rnn, int64_t pseudo_layer, int64_t index) {
  const bool is_first = pseudo_layer < rnn.directions;
  if (index < gates(rnn)) return {rnn.hidden, is_first ? rnn.inputs : rnn.outputs * rnn.directions};
  if (index < 2 * gates(rnn)) return {rnn.hidden, rnn.outputs};
  return {rnn.outputs, rnn.hidden};
}

// Elements before a matrix, of which those of earlier layers come first; of all matrices for the layer after the last.
int64_t matrix_offset(const cudnnRNNStruct &rnn, int64_t pseudo_layer, int64_t index) {
  int64_t elements = 0;
  for (int64_t layer = 0; layer < pseudo_layer; ++layer)
    for (int64_t i = 0; i < matrix_count(rnn); ++i) elements += matrix(rnn, layer, i).elements();
  for (int64_t i = 0; i < index; ++i) elements += matrix(rnn, pseudo_layer, i).elements();
  return elements;
}

// All biases lie behind all matrices, two for each gate.
int64_t bias_offset(const cudnnRNNStruct &rnn, int64_t pseudo_layer, int64_t index) {
  const int64_t before = rnn.has_bias ? pseudo_layer * 2 * gates(rnn) + index : 0;
  return matrix_offset(rnn, rnn.layers * rnn.directions, 0) + before * rnn.hidden;
}

// Answer where a matrix or bias lies, and its shape; the caller may leave out either. No dimensions: there is none.
void answer(cudnnDataType_t type, char *address, Shape shape, void **address_answer, cudnnTensorDescriptor_t tensor) {
  if (address_answer != nullptr) *address_answer = address;
  if (tensor == nullptr) return;
  const int rows = static_cast<int>(shape.rows), columns = static_cast<int>(shape.columns);
  const int sizes[] = {1, rows, columns}, strides[] = {rows * columns, columns, 1};
  cudnnSetTensorNdDescriptor(tensor, type, address == nullptr ? 0 : 3, sizes, strides);
}
}  // namespace

EXPORT cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t *rnn) {
  *rnn = new cudnnRNNStruct;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t rnn) {
  delete rnn;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t rnn, cudnnRNNAlgo_t, cudnnRNNMode_t mode,
                                              cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction,
                                              cudnnRNNInputMode_t, cudnnDataType_t type, cudnnDataType_t,
                                              cudnnMathType_t, int32_t inputs, int32_t hidden, int32_t outputs,
                                              int32_t layers, cudnnDropoutDescriptor_t, uint32_t) {
  *rnn = {mode, type, inputs, hidden, outputs, layers, direction == CUDNN_BIDIRECTIONAL ? 2 : 1,
          bias != CUDNN_RNN_NO_BIAS};
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t rnn, size_t *bytes) {
  *bytes = bias_offset(*rnn, rnn->layers * rnn->directions, 0) * element_bytes(rnn->type);
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t rnn, int32_t pseudo_layer, size_t,
                                             const void *weights, int32_t index, cudnnTensorDescriptor_t matrix_shape,
                                             void **matrix_address, cudnnTensorDescriptor_t bias_shape,
                                             void **bias_address) {
  auto *const first = static_cast<char *>(const_cast<void *>(weights));
  const bool has_matrix = index < matrix_count(*rnn), has_bias = rnn->has_bias && index < 2 * gates(*rnn);
  const size_t element = element_bytes(rnn->type);
  char *const matrix_begin = has_matrix ? first + matrix_offset(*rnn, pseudo_layer, index) * element : nullptr;
  char *const bias_begin = has_bias ? first + bias_offset(*rnn, pseudo_layer, index) * element : nullptr;
  answer(rnn->type, matrix_begin, matrix(*rnn, pseudo_layer, index), matrix_address, matrix_shape);
  answer(rnn->type, bias_begin, {rnn->hidden, 1}, bias_address, bias_shape);
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t *data) {
  *data = new cudnnRNNDataStruct;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t data) {
  delete data;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t data, cudnnDataType_t, cudnnRNNDataLayout_t, int,
                                               int samples, int, const int lengths[], void *) {
  *data = {samples, std::accumulate(lengths, lengths + samples, int64_t{0})};
  return CUDNN_STATUS_SUCCESS;
}

// Only the real cuDNN knows them. These are those of the trace, whose `recurrent_workspaces.py` names the source: there
// a mask of dropped values is part of the reserve space, here it is left out. The caller may leave out either.
EXPORT cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t rnn, cudnnForwardMode_t mode,
                                               cudnnRNNDataDescriptor_t data, size_t *workspace_bytes,
                                               size_t *reserve_bytes) {
  const int64_t kept = rnn->mode == CUDNN_LSTM ? 5 : rnn->mode == CUDNN_GRU ? 6 : 1;
  const int64_t values = rnn->layers * kept + rnn->layers - 1;
  const int64_t units = rnn->hidden * rnn->directions;
  const int64_t states = data->samples * units * rnn->layers * (3 * gates(*rnn) - 1);
  const int64_t matrices = matrix_offset(*rnn, rnn->layers * rnn->directions, 0);
  const int64_t gates_held = std::max<int64_t>(3, gates(*rnn)) + 2 * (rnn->directions - 1);
  const int64_t inputs_held = rnn->layers == 1 && rnn->mode != CUDNN_LSTM ? 2 : 1;
  const int64_t steps =
      data->tokens * (gates_held * units + inputs_held * rnn->inputs + std::max(rnn->inputs, units));
  const size_t element = element_bytes(rnn->type);
  if (workspace_bytes != nullptr)
    *workspace_bytes = (matrices + states + steps) * element + (size_t{8} << 20) * rnn->layers * rnn->directions;
  if (reserve_bytes != nullptr)
    *reserve_bytes = mode == CUDNN_FWD_MODE_TRAINING ? data->tokens * units * values * element + 256 : 0;
  return CUDNN_STATUS_SUCCESS;
}
