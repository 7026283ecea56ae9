// A CUDA device that does nothing, so that a machine without a GPU can trace a training step on fake tensors.
// tools/rehearse.py compiles and loads this file. torch's autograd engine needs a device guard, convolutions query the
// cuDNN version to choose a memory format, and attention queries which kernel to use.

#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

// One device, number 0, with one stream that is always idle.
struct IdleGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream stream) const override { return stream; }
};

// Hooks that report CUDA with a recent cuDNN; torch looks them up once, on import.
struct IdleHooks : CUDAHooksInterface {
  explicit IdleHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, IdleHooks);

// The choice on Ampere and later GPUs: the flash kernel for half precision without a mask, else the memory-efficient
// kernel, or plain math if query heads share keys, which the memory-efficient kernel does not support.
int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    double, bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == kHalf || query.scalar_type() == kBFloat16;
  if (half && !mask && query.size(-1) <= 256 && query.size(-1) == value.size(-1))
    return static_cast<int64_t>(SDPBackend::flash_attention);
  const bool grouped = query.size(1) != key.size(1);
  return static_cast<int64_t>(grouped ? SDPBackend::math : SDPBackend::efficient_attention);
}

}  // namespace at

// Call this after importing torch: it replaces the implementations of a torch built with CUDA.
extern "C" void use_fake_cuda() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(at::kCUDA, new at::IdleGuard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(at::choose_attention);
}
