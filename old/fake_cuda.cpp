// A CUDA device that does nothing, so that a machine without a GPU can trace a training step on fake tensors.
//
// torch's autograd engine asks for the guard of each device that it runs on, and convolutions ask which version of
// cuDNN there is before they choose a memory format. fake_cuda_utils.py compiles this file and loads the result.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

// One device, number 0, with one stream on which everything has always ended.
struct IdleGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kCuda;
  }
  c10::Device getDevice() const override {
    return c10::Device(kCuda, 0);
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

}  // namespace

// To be called once torch is there: a torch that was built with CUDA brings a guard of its own.
extern "C" void use_idle_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(kCuda, new IdleGuard());
}

namespace at {

// What torch asks about the GPU's libraries: a recent cuDNN. It asks once, while it is imported.
struct IdleHooks : public CUDAHooksInterface {
  explicit IdleHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
  int getNumGPUs() const override {
    return 1;
  }
  bool hasCuDNN() const override {
    return true;
  }
  bool compiledWithCuDNN() const override {
    return true;
  }
  bool supportsDilatedConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsDepthwiseConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override {
    return true;
  }
  long versionCuDNN() const override {
    return 91000;
  }
  long versionRuntimeCuDNN() const override {
    return 91000;
  }
  long versionCuDNNFrontend() const override {
    return 11200;
  }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, IdleHooks);

}  // namespace at
