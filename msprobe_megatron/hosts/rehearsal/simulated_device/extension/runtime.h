// What torch asks of a device: streams, events, generators.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "order.h"

namespace simulated {

constexpr c10::DeviceIndex kDevices = 8;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = current_device;
    if (d.index() >= 0) current_device = d.index();
    return {kDevice, before};
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device d) const override { exchangeDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::Stream stream(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, current_device), id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(order.new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(order.new_stream()); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = current_stream;
    current_stream = s.id();
    return stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id() + 1); }
  bool queryStream(const c10::Stream& s) const override { return order.query(order.clock_of(s.id())); }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& s) const override {
    host_waits("stream.synchronize");
    order.host_waits_for_stream(s.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    host_waits("device.synchronize");
    order.host_waits_for_all();
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    order.record(*static_cast<Event*>(*event), s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) order.stream_waits(*static_cast<Event*>(event), s.id());
  }
  bool queryEvent(void* event) const override { return !event || order.query(static_cast<Event*>(event)->clock); }
  void synchronizeEvent(void* event) const override {
    host_waits("event.synchronize");
    if (!event || faults.skips(skip_event_synchronize)) return;
    order.host_waits_for(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->when - static_cast<Event*>(first)->when;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    allocator.recordStream(data, s);
  }
};

// Generators of the device's own: mt19937 like the host's, with a state apart from it.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto& all = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < kDevices; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }());
  return all.at(index < 0 ? current_device : index);
}

// Lets the host's kernels draw from a generator of the device while it lives: they know only the host's default one.
class Drawing {
 public:
  explicit Drawing(at::Generator generator)
      : lock_(mutex()), mine_(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())), held_(generator) {
    hosts_ = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    engine_ = hosts_->engine();
    normal_ = hosts_->next_float_normal_sample();
    double_normal_ = hosts_->next_double_normal_sample();
    hosts_->set_engine(mine_->engine());
    hosts_->set_next_float_normal_sample(mine_->next_float_normal_sample());
    hosts_->set_next_double_normal_sample(mine_->next_double_normal_sample());
  }
  ~Drawing() {
    mine_->set_engine(hosts_->engine());
    mine_->set_next_float_normal_sample(hosts_->next_float_normal_sample());
    mine_->set_next_double_normal_sample(hosts_->next_double_normal_sample());
    hosts_->set_engine(engine_);
    hosts_->set_next_float_normal_sample(normal_);
    hosts_->set_next_double_normal_sample(double_normal_);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex& one = *new std::mutex;
    return one;
  }
  std::lock_guard<std::mutex> lock_;
  Generator* mine_;
  at::Generator held_;
  at::CPUGeneratorImpl* hosts_;
  at::mt19937 engine_;
  std::optional<float> normal_;
  std::optional<double> double_normal_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current_device = d; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current_device, d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 ? current_device : std::exchange(current_device, d);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Device getDeviceFromPtr(void*) const override { return {kDevice, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<Generator>(i < 0 ? current_device : i);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_storage(s.unsafeGetStorageImpl(), n);
  }
};

}  // namespace simulated
