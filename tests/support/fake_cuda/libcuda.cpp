// A fake NVIDIA driver for tests of the launcher. Device memory is host memory, a stream is a thread that
// runs its operations in order, and a launch calls a function that the test provides.
//
// Like the real driver, the fake driver returns an error for
//   - calls without a context
//   - copies outside an allocation
//   - cooperative grids with more blocks than SMs
//   - invalid tensor maps
//   - launches and events on another device's stream
//   - anything but launches during stream capture
// It also returns an error for every allocation, copy or fill of zero bytes, because the real driver's
// behaviour is not documented for all of them.
//
// Environment variables set the number of devices (FAKE_CUDA_DEVICES, default 1), the SMs of each
// (FAKE_CUDA_SMS, 132), ten times the compute capability (FAKE_CUDA_CAPABILITY, 90), the driver's version
// (FAKE_CUDA_VERSION, 13000), whether GPUs can access each other's memory (FAKE_CUDA_PEERS, 1), and whether
// the links between them have atomics (FAKE_CUDA_PEER_ATOMICS, 1).
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../cuda/host/tensor_map.h"

namespace {

constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kInvalidHandle = 400,
              kNotFound = 500, kNotReady = 600, kPeerEnabled = 704, kTooLarge = 720,
              kCaptureUnsupported = 900;
constexpr size_t kMemory = size_t{1} << 34;

int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

using Work = std::function<void()>;
using Works = std::vector<Work>;
using Run = void (*)(const mk::Params*, int blocks, int cooperative);

std::atomic<Run> run_kernel{nullptr};
std::atomic<int> launches{0};

thread_local int64_t current = 0;  // device + 1

class Stream {
 public:
  const int64_t context = current;

  Stream() : thread_([this] { loop(); }) {}
  ~Stream() {
    push(nullptr);
    thread_.join();
  }
  void push(Work work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return work_.empty();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return work_.empty(); });
  }
  Works* recording = nullptr;

 private:
  void loop() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      const Work work = work_.front();
      if (!work) return;
      lock.unlock();
      work();
      lock.lock();
      work_.pop_front();  // only now, because a stream that runs work is not idle
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  std::thread thread_;
};

struct Event {
  const int64_t context = current;
  std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(true);
  std::shared_ptr<std::chrono::steady_clock::time_point> at =
      std::make_shared<std::chrono::steady_clock::time_point>();
};

struct Function {
  int64_t shared = 0;
};

std::mutex memory_mutex;
std::set<Stream*> streams;  // used only by the main thread
std::map<uint64_t, size_t> memory, pinned;
std::set<std::pair<int64_t, int64_t>> peers;

bool on_device(uint64_t address, size_t size) {
  const std::lock_guard lock(memory_mutex);
  auto next = memory.upper_bound(address);
  if (next == memory.begin()) return false;
  --next;
  return address + size <= next->first + next->second;
}

int launch(Function* f, unsigned blocks, unsigned threads, unsigned shared, Stream* stream, void** arguments,
           bool cooperative) {
  if (!current) return kInvalidContext;
  if (stream->context != current) return kInvalidHandle;
  if (threads != mk::kThreads || shared > f->shared) return kInvalidValue;
  if (cooperative && blocks > static_cast<unsigned>(setting("FAKE_CUDA_SMS", 132))) return kTooLarge;
  const mk::Params params = *static_cast<const mk::Params*>(arguments[0]);
  const Work work = [params, blocks, cooperative] {
    ++launches;
    if (const Run run = run_kernel.load()) run(&params, static_cast<int>(blocks), cooperative);
  };
  if (stream->recording) {
    stream->recording->push_back(work);
  } else {
    stream->push(work);
  }
  return kOk;
}

template <class T>
int give(T* out, T value) {
  *out = value;
  return kOk;
}

template <class T>
int destroyed(T* object) {
  delete object;
  return kOk;
}

// Waits for the work of all streams, as the real driver may when it allocates or frees memory or loads code.
void wait_for_all() {
  for (Stream* stream : streams) stream->wait();
}

int allocate(std::map<uint64_t, size_t>& blocks, void** address, size_t alignment, size_t size) {
  if (!current) return kInvalidContext;
  wait_for_all();
  if (size == 0) return kInvalidValue;
  if (size > kMemory || posix_memalign(address, alignment, size)) return kOutOfMemory;
  memset(*address, 0xFF, size);  // NaN in every floating-point type
  const std::lock_guard lock(memory_mutex);
  blocks[reinterpret_cast<uint64_t>(*address)] = size;
  return kOk;
}

int release(std::map<uint64_t, size_t>& blocks, uint64_t address) {
  wait_for_all();
  const std::lock_guard lock(memory_mutex);
  if (!blocks.erase(address)) return kInvalidValue;
  free(reinterpret_cast<void*>(address));
  return kOk;
}

// Queues `work` on a stream if the `size` bytes at `address` lie in one allocation of device memory.
int on_memory(uint64_t address, size_t size, Stream* stream, Work work) {
  if (!current) return kInvalidContext;
  if (stream->recording) return kCaptureUnsupported;
  if (size == 0 || !on_device(address, size)) return kInvalidValue;
  stream->push(std::move(work));
  return kOk;
}

}  // namespace

extern "C" {

// -- for the test
void fake_set_kernel(Run run) { run_kernel = run; }
int fake_launches() { return launches; }
int fake_allocations() {
  const std::lock_guard lock(memory_mutex);
  return static_cast<int>(memory.size() + pinned.size());
}

// -- the driver
int cuInit(unsigned) { return kOk; }
int cuDriverGetVersion(int* version) { return give(version, setting("FAKE_CUDA_VERSION", 13000)); }
int cuDeviceGetCount(int* count) { return give(count, setting("FAKE_CUDA_DEVICES", 1)); }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < setting("FAKE_CUDA_DEVICES", 1) ? kOk : 101;
}
int cuDeviceGetName(char* name, int size, int) {
  strncpy(name, "NVIDIA H200 (pretended)", static_cast<size_t>(size));
  return kOk;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) { return give(bytes, kMemory); }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = setting("FAKE_CUDA_CAPABILITY", 90);
  const std::map<int, int> values{
      {16, setting("FAKE_CUDA_SMS", 132)}, {75, capability / 10}, {76, capability % 10}};
  return give(value, values.contains(attribute) ? values.at(attribute) : 1);
}
int cuDevicePrimaryCtxRetain(int64_t* context, int device) { return give(context, int64_t{device} + 1); }
int cuDevicePrimaryCtxRelease_v2(int) { return kOk; }
int cuCtxSetCurrent(int64_t context) { return give(&current, context); }
int cuDeviceCanAccessPeer(int* can, int, int) { return give(can, setting("FAKE_CUDA_PEERS", 1)); }
int cuDeviceGetP2PAttribute(int* value, int, int, int) {
  return give(value, setting("FAKE_CUDA_PEER_ATOMICS", 1));
}
int cuCtxEnablePeerAccess(int64_t context, unsigned) {
  const std::lock_guard lock(memory_mutex);
  return peers.insert({current, context}).second ? kOk : kPeerEnabled;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (!current) return kInvalidContext;
  *free = *total = kMemory;
  return kOk;
}
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  return allocate(memory, reinterpret_cast<void**>(address), 256, size);
}
int cuMemFree_v2(uint64_t address) { return current ? release(memory, address) : kInvalidContext; }
int cuMemHostAlloc(void** address, size_t size, unsigned) { return allocate(pinned, address, 4096, size); }
int cuMemFreeHost(void* address) { return release(pinned, reinterpret_cast<uint64_t>(address)); }
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, Stream* stream) {
  return on_memory(to, size, stream, [=] { memset(reinterpret_cast<void*>(to), value, size); });
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t size, Stream* stream) {
  return on_memory(to, size, stream, [=] { memcpy(reinterpret_cast<void*>(to), from, size); });
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, Stream* stream) {
  return on_memory(from, size, stream, [=] { memcpy(to, reinterpret_cast<const void*>(from), size); });
}
int cuStreamCreate(Stream** stream, unsigned) {
  if (!current) return kInvalidContext;
  *stream = new Stream;
  streams.insert(*stream);
  return kOk;
}
int cuStreamDestroy_v2(Stream* stream) {
  streams.erase(stream);
  return destroyed(stream);
}
int cuStreamQuery(Stream* stream) {
  if (stream->recording) return kCaptureUnsupported;
  return stream->idle() ? kOk : kNotReady;
}
int cuStreamSynchronize(Stream* stream) {
  if (stream->recording) return kCaptureUnsupported;
  stream->wait();
  return kOk;
}
int cuStreamBeginCapture_v2(Stream* stream, int) { return give(&stream->recording, new Works); }
int cuStreamEndCapture(Stream* stream, Works** graph) {
  return give(graph, std::exchange(stream->recording, nullptr));
}
int cuGraphInstantiateWithFlags(Works** made, Works* graph, uint64_t) {
  return give(made, new Works(*graph));
}
int cuGraphLaunch(Works* executable, Stream* stream) {
  for (const Work& work : *executable) stream->push(work);
  return kOk;
}
int cuGraphExecDestroy(Works* executable) { return destroyed(executable); }
int cuGraphDestroy(Works* graph) { return destroyed(graph); }
int cuEventCreate(Event** event, unsigned) { return give(event, new Event); }
int cuEventDestroy_v2(Event* event) { return destroyed(event); }
int cuEventRecord(Event* event, Stream* stream) {
  if (event->context != stream->context) return kInvalidHandle;
  if (stream->recording) return kCaptureUnsupported;
  event->done = std::make_shared<std::atomic<bool>>(false);
  stream->push([done = event->done, at = event->at] {
    *at = std::chrono::steady_clock::now();
    *done = true;
  });
  return kOk;
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  stream->push([done = event->done] {
    while (!*done) std::this_thread::yield();
  });
  return kOk;
}
int cuEventElapsedTime(float* ms, Event* begin, Event* end) {
  if (!*begin->done || !*end->done) return kNotReady;
  return give(ms, std::chrono::duration<float, std::milli>(*end->at - *begin->at).count());
}
int cuEventQuery(Event* event) { return *event->done ? kOk : kNotReady; }
int cuModuleLoadData(char** module, const void*) {
  return current ? give(module, new char{}) : kInvalidContext;
}
int cuModuleUnload(char* module) { return destroyed(module); }
int cuModuleGetFunction(Function** function, void*, const char* name) {
  static Function kernel;
  wait_for_all();  // code is loaded lazily, here
  *function = &kernel;
  return strcmp(name, "megakernel") ? kNotFound : kOk;
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (attribute != 8 || value > 227 * 1024) return kInvalidValue;
  function->shared = value;
  return kOk;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t shared) {
  *blocks = threads <= 1024 && static_cast<int64_t>(shared) <= function->shared ? 1 : 0;
  return kOk;
}
int cuLaunchCooperativeKernel(Function* f, unsigned x, unsigned, unsigned, unsigned threads, unsigned,
                              unsigned, unsigned shared, Stream* stream, void** arguments) {
  return launch(f, x, threads, shared, stream, arguments, true);
}
int cuLaunchKernel(Function* f, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared, Stream* stream, void** arguments, void**) {
  return launch(f, x, threads, shared, stream, arguments, false);
}
// Writes a HostMap, the format of a tensor map in tests/cuda/host, instead of the hardware's own format.
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int, int) {
  if (reinterpret_cast<uint64_t>(map) % 64 || reinterpret_cast<uint64_t>(address) % 16) return kInvalidValue;
  if (rank < 3 || rank > mk::kMapDimensions || (type != 7 && type != 9)) return kInvalidValue;
  if (interleave != 0 || (swizzle != 0 && swizzle != 3)) return kInvalidValue;
  mk::HostMap made{.base = static_cast<char*>(address),
                   .strides = {},
                   .sizes = {1, 1, 1, 1, 1},
                   .box = {1, 1, 1, 1, 1},
                   .item = type == 9 ? 2 : 4,
                   .swizzled = swizzle == 3};
  made.strides[0] = made.item;
  for (unsigned i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1)
      return kInvalidValue;
    made.sizes[i] = static_cast<int32_t>(sizes[i]);
    made.box[i] = static_cast<int32_t>(box[i]);
    if (i == 0) continue;
    if (strides[i - 1] % 16 || strides[i - 1] >= uint64_t{1} << 40) return kInvalidValue;
    made.strides[i] = static_cast<int64_t>(strides[i - 1]);
  }
  const uint64_t row = box[0] * static_cast<uint64_t>(made.item);
  if (row % 16 || (made.swizzled && row > 128) || made.bytes() > mk::kPageBytes) return kInvalidValue;
  uint64_t last = 0;  // offset of the last element, in bytes
  for (int i = 0; i < mk::kMapDimensions; ++i) last += made.strides[i] * (made.sizes[i] - 1);
  if (!on_device(reinterpret_cast<uint64_t>(address), last + made.item)) return kInvalidValue;
  memset(map, 0, mk::kMapBytes);
  memcpy(map, &made, sizeof made);
  return kOk;
}

// cuda-python looks up all other functions through this one, by names without a version suffix such as _v2.
int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* version : {"_v2", ""}) {
    if (self && (*function = dlsym(self, (std::string(symbol) + version).c_str())) != nullptr) break;
  }
  if (status) *status = *function ? 0 : 1;
  return *function ? kOk : kNotFound;
}

}  // extern "C"
