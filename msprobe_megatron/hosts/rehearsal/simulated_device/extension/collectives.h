// A process group for device tensors: gloo carries the bytes, on a communication stream of the group's own.
//
// A collective starts behind the current stream's work, reads its inputs then, and writes its outputs when something
// waits for it. Who reads an output without having waited reads poison (order.h).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "kernels.h"

namespace simulated {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

// What has to be done on the host before the outputs can be written.
struct Transfer final : Unfinished {
  std::vector<WorkPtr> inner;
  Tensors outputs;
  std::function<Tensors()> results;  // what goes into them, once `inner` is done
  Tensors held;                      // host copies that gloo is reading
  std::mutex mutex;
  std::atomic<bool> done{false};

  void finish() override {
    std::lock_guard<std::mutex> lock(mutex);
    if (done) return;
    for (auto& work : inner) work->wait();
    const auto values = results ? results() : Tensors{};
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < outputs.size(); i++) {
      auto target = host_alias(outputs[i]);
      if (target.numel()) target.copy_(values[i].reshape(target.sizes()));
    }
    held.clear();
    done = true;
  }
};

class DeviceWork final : public Work {
 public:
  DeviceWork(std::vector<std::shared_ptr<Transfer>> parts, int64_t stream)
      : parts_(std::move(parts)), stream_(stream) {
    Guard().record(&event_, Guard::stream(stream), current_device, c10::EventFlag::PYTORCH_DEFAULT);
  }
  ~DeviceWork() override { Guard().destroyEvent(event_, current_device); }

  bool isCompleted() override {
    for (auto& part : parts_)
      if (!part->done)
        for (auto& work : part->inner)
          if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  // The current stream waits; the host goes on, as far as a real device's would.
  bool wait(std::chrono::milliseconds) override {
    if (faults.skips(skip_work_wait)) return true;
    Guard().block(event_, Guard::stream(current_stream));
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  void blockCurrentStream() override { wait(std::chrono::milliseconds(0)); }
  std::vector<at::Tensor> result() override {
    Tensors all;
    for (auto& part : parts_) all.insert(all.end(), part->outputs.begin(), part->outputs.end());
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(std::chrono::milliseconds(0));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(result()));
    return future;
  }

 private:
  std::vector<std::shared_ptr<Transfer>> parts_;
  int64_t stream_;
  void* event_ = nullptr;
};

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)), stream_(order.new_stream()) {}

  const std::string getBackendName() const override { return "hccl"; }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    return c10::make_intrusive<DeviceWork>(std::exchange(together_, {}), stream_);
  }

  WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& options) override {
    auto host = inputs(ts);
    return started({gloo_->broadcast(host, options)}, ts, [host] { return host; });
  }
  WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& options) override {
    auto host = inputs(ts);
    return started({reduced(host, options.reduceOp)}, ts, averaged(host, options.reduceOp));
  }
  WorkPtr allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = inputs(ts);
    std::vector<WorkPtr> works;
    for (auto& t : host) {
      Tensors one{t};
      works.push_back(reduced(one, options.reduceOp));
    }
    return started(std::move(works), ts, averaged(host, options.reduceOp));
  }
  WorkPtr reduce(Tensors& ts, const c10d::ReduceOptions& options) override {
    auto host = inputs(ts);
    return started({gloo_->reduce(host, options)}, ts, [host] { return host; });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions&) override {
    auto own = inputs(ins);
    Tensors host;
    for (auto& out : outs[0]) host.push_back(at::empty(out.sizes(), out.options().device(at::kCPU)));
    // Ranks may hold different sizes, which gloo's all-gather does not take.
    std::vector<WorkPtr> works;
    for (int rank = 0; rank < getSize(); rank++) {
      if (rank == getRank()) host[rank].copy_(own[0].view(host[rank].sizes()));
      c10d::BroadcastOptions options;
      options.rootRank = rank;
      Tensors one{host[rank]};
      works.push_back(gloo_->broadcast(one, options));
    }
    return started(std::move(works), outs[0], [host] { return host; });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    Tensors ins{in}, outs{out};
    return allgather_into_tensor_coalesced(outs, ins, {});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions&) override {
    auto own = inputs(ins);
    Tensors host;
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < outs.size(); i++) {
      host.push_back(at::empty({outs[i].numel()}, outs[i].options().device(at::kCPU)));
      std::vector<Tensors> parts{host[i].chunk(getSize())};
      Tensors one{own[i].view(-1)};
      works.push_back(gloo_->allgather(parts, one, c10d::AllgatherOptions()));
    }
    return started(std::move(works), outs, [host] { return host; }, own);
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    auto host = inputs(ins[0]);
    std::vector<WorkPtr> works;
    for (auto& t : host) {
      Tensors one{t};
      works.push_back(reduced(one, options.reduceOp));
    }
    return started(std::move(works), outs, averaged({host[getRank()]}, options.reduceOp), host);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Tensors ins{in}, outs{out};
    return reduce_scatter_tensor_coalesced(outs, ins, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& options) override {
    auto host = inputs(ins);
    std::vector<WorkPtr> works;
    Tensors own;
    for (auto& t : host) {
      Tensors one{t};
      works.push_back(reduced(one, options.reduceOp));
      own.push_back(t.view(-1).chunk(getSize())[getRank()]);
    }
    return started(std::move(works), outs, averaged(own, options.reduceOp), host);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto host = inputs({in});
    Tensors to{at::empty(out.sizes(), out.options().device(at::kCPU))};
    return started({gloo_->alltoall_base(to[0], host[0], out_sizes, in_sizes, options)}, {out}, [to] { return to; },
                   host);
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override {
    auto own = inputs(ins);
    Tensors targets = outs.empty() ? Tensors{} : outs[0], host;
    for (auto& out : targets) host.push_back(at::empty(out.sizes(), out.options().device(at::kCPU)));
    std::vector<Tensors> parts;
    if (!outs.empty()) parts.push_back(host);
    return started({gloo_->gather(parts, own, options)}, targets, [host] { return host; }, own);
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> parts;
    for (auto& list : ins) parts.push_back(inputs(list));
    Tensors host{at::empty(outs[0].sizes(), outs[0].options().device(at::kCPU))};
    return started({gloo_->scatter(host, parts, options)}, outs, [host] { return host; },
                   parts.empty() ? Tensors{} : parts[0]);
  }
  WorkPtr send(Tensors& ts, int to, int tag) override {
    auto host = inputs(ts);
    return started({gloo_->send(host, to, tag)}, {}, nullptr, host);
  }
  WorkPtr recv(Tensors& ts, int from, int tag) override {
    behind_current_stream();
    Tensors host;
    for (auto& t : ts) host.push_back(at::empty(t.sizes(), t.options().device(at::kCPU)));
    return started({gloo_->recv(host, from, tag)}, ts, [host] { return host; });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    host_waits("barrier");
    return gloo_->barrier(options);
  }

 private:
  // The communication stream waits for what the current one has been given so far.
  void behind_current_stream() {
    Event event;
    order.record(event, current_stream);
    order.stream_waits(event, stream_);
  }

  Tensors inputs(const Tensors& ts) {
    behind_current_stream();
    Tensors host;
    for (auto& t : ts) {
      share(t);
      Aliases aliases;
      auto source = readable(t, touch(t, false, stream_, "collective"), aliases);
      host.push_back(source.clone(at::MemoryFormat::Contiguous));
    }
    return host;
  }

  // The memory is not reused before the collective is done, as with the real backend.
  static void share(const at::Tensor& t) {
    TORCH_CHECK(t.is_privateuseone(), "hccl (simulated): a tensor of the device is needed, not of ", t.device());
    if (auto* block = block_of(t.storage().unsafeGetStorageImpl())) block->shared = true;
  }

  static bool averages(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }

  WorkPtr reduced(Tensors& host, const c10d::ReduceOp& op) {
    c10d::AllreduceOptions options;
    options.reduceOp = averages(op) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    return gloo_->allreduce(host, options);
  }

  std::function<Tensors()> averaged(Tensors host, const c10d::ReduceOp& op) {
    const int64_t by = averages(op) ? getSize() : 1;
    return [host, by] {
      if (by > 1)
        for (auto& t : host) const_cast<at::Tensor&>(t).div_(by);
      return host;
    };
  }

  WorkPtr started(std::vector<WorkPtr> inner, Tensors outputs, std::function<Tensors()> results, Tensors held = {}) {
    launched("collective", outputs.empty() ? at::Tensor() : outputs[0]);
    auto transfer = std::make_shared<Transfer>();
    for (auto& t : outputs) {
      share(t);
      touch(t, true, stream_, "collective");
    }
    transfer->inner = std::move(inner);
    transfer->outputs = std::move(outputs);
    transfer->results = std::move(results);
    transfer->held = std::move(held);
    order.started(transfer, stream_);
    if (coalescing_) together_.push_back(transfer);
    return c10::make_intrusive<DeviceWork>(std::vector<std::shared_ptr<Transfer>>{transfer}, stream_);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t stream_;
  bool coalescing_ = false;
  std::vector<std::shared_ptr<Transfer>> together_;
};

}  // namespace simulated
