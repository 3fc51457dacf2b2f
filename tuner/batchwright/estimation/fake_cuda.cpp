// Stand-in for CUDA while fake tensors are traced on a host without it: an idle device, and the choice of attention
// kernels. Nothing is computed or allocated. Compiled and loaded by cuda_shim.py.

#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr long kCudnnVersion = 92000;  // 9.20, as in torch 2.13's wheels

// One idle device with one stream: autograd starts a thread for it, and switches to it before every operator.
struct IdleDevice final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// Properties by which kernels are chosen: cuDNN is present in its current version. torch looks up this class name.
// Two functions are not marked `override`, since torch 2.8 lacks them.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return kCudnnVersion; }
  long versionRuntimeCuDNN() const { return kCudnnVersion; }
  std::string showConfig() const override { return ""; }  // torch.__config__.show(), as libraries call when imported
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const { return true; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};

// The rule itself is in attention_kernels.py. The figures are in the order of its class `Attention`.
using Rule = int64_t (*)(const int64_t* figures, double dropout);
std::atomic<Rule> rule{nullptr};

int64_t choose(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> /*scale*/,
    bool grouped) {
  const Rule chosen = rule.load();
  constexpr int64_t kMath = 0;
  if (chosen == nullptr || query.dim() != 4 || key.dim() != 4 || value.dim() != 4) {
    return kMath;
  }
  const bool dense =
      query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
  const bool masked = mask.has_value() && mask->defined();
  const bool trained = c10::GradMode::is_enabled() &&
      (query.requires_grad() || key.requires_grad() || value.requires_grad());
  const bool same_type = query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type();
  const std::array<int64_t, 15> figures = {
      same_type ? static_cast<int64_t>(query.scalar_type()) : -1,
      query.size(0),
      query.size(1),
      key.size(1),
      value.size(1),
      query.size(2),
      key.size(2),
      query.size(3),
      key.size(3),
      value.size(3),
      masked,
      masked && mask->requires_grad(),
      causal,
      grouped,
      (trained ? 1 : 0) | (dense ? 2 : 0),
  };
  return chosen(figures.data(), dropout);
}

// Registered before torch is imported, because torch looks its hooks up once. The hooks of a torch with CUDA are
// registered later, with a lower priority.
c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> hooks(
    "CUDAHooks",
    c10::REGISTRY_PREFERRED,
    at::CUDAHooksRegistry(),
    [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<CUDAHooks>(args); });

IdleDevice device;

}  // namespace

// Called after torch has been imported: replaces the device that a torch with CUDA has registered by then.
extern "C" void batchwright_install(Rule given) {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&device);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  rule.store(given);
}
