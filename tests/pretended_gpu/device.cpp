// A GPU that isn't there, for tests: tensors of the device 'cuda' whose memory is the CPU's, and
// operators that are the CPU's. For a PyTorch without CUDA, whose dispatcher has the device's place
// empty. What a GPU refuses is refused: operators of tensors on the GPU and on the CPU together, and
// operators that have been written for the CPU alone (all that are not PyTorch's own). It has random
// numbers of its own. See sitecustomize.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;

constexpr DeviceIndex DEVICES = 4;
thread_local DeviceIndex current = 0;
std::atomic<int64_t> waits{0};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<at::kCUDA> {
  Device exchangeDevice(Device device) const override {
    const Device before(at::kCUDA, current);
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return {at::kCUDA, current}; }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const noexcept override {
    const Device own(at::kCUDA, std::max<DeviceIndex>(device.index(), 0));
    return c10::Stream(c10::Stream::DEFAULT, own);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return getStream(stream.device());
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Memory ###########################################################################################

std::atomic<int64_t> allocated{0}, peak{0};

// Memory of the CPU that is called the device's, and is counted.
template <class Owner>
c10::DataPtr as_device(Owner owner, void* data, size_t size, DeviceIndex index) {
  struct Held {
    Owner owner;
    int64_t size;
    ~Held() { allocated -= size; }
  };
  auto* held = new Held{std::move(owner), static_cast<int64_t>(size)};
  int64_t now = allocated += held->size, most = peak;
  while (most < now && !peak.compare_exchange_weak(most, now)) {}
  const auto drop = [](void* context) { delete static_cast<Held*>(context); };
  return {data, held, drop, Device(at::kCUDA, index)};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto found = c10::GetAllocator(at::kCPU)->allocate(size);
    auto* data = found.get();
    return as_device(std::move(found), data, size, current);
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};
Memory memory;
REGISTER_ALLOCATOR(at::kCUDA, &memory)

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return c10::GetAllocator(at::kCPU)->allocate(size); }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};
Pinned pinned;

// Random numbers of the device: the CPU's algorithm, with a state of their own.
struct Numbers final : c10::GeneratorImpl {
  explicit Numbers(uint64_t seed = at::default_rng_seed_val)
      : GeneratorImpl(Device(at::kCUDA, 0), DispatchKeySet(DispatchKey::CUDA)),
        of_cpu(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { of_cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { of_cpu.set_offset(offset); }
  uint64_t get_offset() const override { return of_cpu.get_offset(); }
  uint64_t current_seed() const override { return of_cpu.current_seed(); }
  uint64_t seed() override { return of_cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { of_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return of_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Numbers* clone_impl() const override {
    auto* copy = new Numbers();
    copy->set_state(*get_state());
    return copy;
  }
  at::Generator of_cpu;
};

const at::Generator& own_random_numbers() {
  static const auto found = at::make_generator<Numbers>();
  return found;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return own_random_numbers();
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<Numbers>(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  std::string showConfig() const override { return ""; }
  void deviceSynchronize(DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// Operators ########################################################################################

// The CPU's tensors of one call, and whose memory they have.
struct Call {
  DeviceIndex index = 0;
  std::map<StorageImpl*, Storage> here, there;  // of one of the device, and back
  std::vector<std::pair<Tensor, Tensor>> pairs;  // of the device, and of the CPU
  std::vector<Tensor> foreign;  // tensors of the CPU that were given

  Tensor to_host(const Tensor& tensor) {
    TORCH_CHECK(tensor.layout() == at::kStrided, "the pretended GPU has strided tensors only");
    index = tensor.device().index();
    for (const auto& pair : pairs) {
      if (pair.first.is_same(tensor)) return pair.second;
    }
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    if (!here.count(impl)) {
      c10::DataPtr borrowed(impl->mutable_data(), Device(at::kCPU));
      Storage alias(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), impl->nbytes(), std::move(borrowed),
          c10::GetAllocator(at::kCPU), true));
      there.emplace(alias.unsafeGetStorageImpl(), tensor.storage());
      here.emplace(impl, alias);
    }
    auto found = at::detail::make_tensor<c10::TensorImpl>(
        Storage(here.at(impl)), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    found.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      found.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    pairs.emplace_back(tensor, found);
    return found;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& given : foreign) {
      if (given.is_same(tensor)) return tensor;
    }
    for (const auto& pair : pairs) {
      if (pair.second.is_same(tensor)) return pair.first;
    }
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    if (!there.count(impl)) {
      auto data = as_device(tensor.storage(), impl->mutable_data(), impl->nbytes(), index);
      there.emplace(impl, Storage(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), impl->nbytes(), std::move(data), &memory, true)));
    }
    auto found = at::detail::make_tensor<c10::TensorImpl>(
        Storage(there.at(impl)), DispatchKeySet(DispatchKey::CUDA), tensor.dtype());
    found.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return found;
  }

  // What the operator did to shapes and memory of what it was given.
  void settle() {
    for (auto& [impl, alias] : here) {
      if (alias.data() != impl->data() || alias.nbytes() != impl->nbytes()) {
        const auto size = alias.nbytes();
        auto* own = alias.unsafeGetStorageImpl();
        auto moved = own->set_data_ptr({nullptr, Device(at::kCPU)});
        auto* data = moved.get();
        impl->set_data_ptr_noswap(as_device(std::move(moved), data, size, index));
        impl->set_nbytes(size);
      }
    }
    for (const auto& [ours, theirs] : pairs) {
      if (ours.sizes() != theirs.sizes() || ours.strides() != theirs.strides() ||
          ours.storage_offset() != theirs.storage_offset()) {
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(
            theirs.sizes(), theirs.strides(), theirs.storage_offset());
      }
    }
  }
};

// What PyTorch allows: copies, and places on the CPU in a tensor of a GPU.
const std::set<std::string> MIXED{
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index",
    "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"};
// Operators after which the CPU knows numbers of the GPU, so that it has waited for it.
const std::set<std::string> WAITING{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::bincount",
    "aten::repeat_interleave.Tensor"};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.overload_name().empty()
      ? schema.name() : schema.name() + "." + schema.overload_name();
  TORCH_CHECK_NOT_IMPLEMENTED(
      schema.name().rfind("aten::", 0) == 0 || schema.name().rfind("prims::", 0) == 0,
      name, " has no kernel for the pretended GPU");
  Call call;
  bool host = false, device = false;
  std::set<DeviceIndex> numbers;  // Of its GPUs.
  const auto given = [&](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host |= tensor.dim() > 0;
      call.foreign.push_back(tensor);
      return tensor;
    }
    device = true;
    if (tensor.dim() > 0) numbers.insert(tensor.device().index());
    return call.to_host(tensor);
  };
  const auto count = schema.arguments().size(), first = stack->size() - count;
  for (const auto k : c10::irange(count)) {
    auto& value = (*stack)[first + k];
    if (value.isTensor()) {
      value = given(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> found;
      for (const Tensor& tensor : value.toTensorVector()) found.push_back(given(tensor));
      value = c10::List<Tensor>(found);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        found.push_back(tensor ? std::optional<Tensor>(given(*tensor)) : tensor);
      }
      value = found;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      call.index = value.toDevice().index();
      value = Device(at::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      value = static_cast<Numbers*>(value.toGenerator().unsafeGetGeneratorImpl())->of_cpu;
    } else if (value.isNone() && schema.arguments()[k].name() == "generator") {
      value = static_cast<Numbers*>(own_random_numbers().unsafeGetGeneratorImpl())->of_cpu;
    }
  }
  TORCH_CHECK(!host || !device || MIXED.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:",
              int(call.index), " and cpu! (", name, ")");
  TORCH_CHECK(numbers.size() < 2 || schema.name().rfind("aten::copy_", 0) == 0 ||
                  schema.name().rfind("aten::_copy_from", 0) == 0,
              "Expected all tensors to be on the same device, but found at least two devices, cuda:",
              int(*numbers.begin()), " and cuda:", int(*numbers.rbegin()), "! (", name, ")");
  waits += WAITING.count(name) + (schema.name() == "aten::copy_" && host);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.settle();
  if (!device) return;
  const auto results = schema.returns().size(), start = stack->size() - results;
  for (const auto k : c10::irange(results)) {
    auto& value = (*stack)[start + k];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> found;
      for (const Tensor& tensor : value.toTensorVector()) found.push_back(call.to_device(tensor));
      value = c10::List<Tensor>(found);
    }
  }
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<Device> device, std::optional<bool> pin) {
  const c10::OptionalDeviceGuard guard(device);
  const DispatchKeySet keys(DispatchKey::CUDA);
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, type);
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

// The CPU's has no generator of its own among its arguments.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  auto mask = at::empty_like(x, x.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {x.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

void record_stream(Tensor& self, c10::Stream stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY(pretended_gpu, m) {
  m.def("current() -> int", []() -> int64_t { return current; });
  m.def("choose(int index) -> ()", [](int64_t index) { current = index; });
  m.def("allocated(bool most) -> int", [](bool most) -> int64_t { return most ? peak : allocated; });
  m.def("forget_peak() -> ()", []() { peak = allocated.load(); });
  m.def("resize_storage(Tensor of, int size) -> ()", [](const Tensor& of, int64_t size) {
    auto* impl = of.storage().unsafeGetStorageImpl();
    c10::DataPtr data = memory.allocate(size);
    const auto kept = std::min<size_t>(size, impl->nbytes());
    if (kept) memory.copy_data(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  });
  m.def("waits() -> int", []() -> int64_t { return waits.exchange(0); });
  m.def("get_rng_state() -> Tensor", []() { return own_random_numbers().get_state(); });
  m.def("set_rng_state(Tensor state) -> ()",
        [](const Tensor& state) { at::Generator(own_random_numbers()).set_state(state); });
  m.def("manual_seed(int seed) -> ()",
        [](int64_t seed) { at::Generator(own_random_numbers()).set_current_seed(seed); });
}

}  // namespace
