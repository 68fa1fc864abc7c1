// A host transport of NVSHMEM for tests: it carries remote puts and signals between GPUs of one host by CUDA IPC.
//
// NVSHMEM reaches other hosts through a plugin that its proxy thread calls. The plugins of NVIDIA need a network card.
// This one needs none, so the device code, the proxy's queue and the signals of the remote path run on one machine.
// Its link is emulated: a put of n bytes occupies it for n / rate, and its signal arrives a latency later. The data
// itself travels at once; nobody may read it before the signal.
//
// NVSHMEM 3.4.5 knows its plugins by file name. A library that is already loaded under the soname
// nvshmem_transport_ucx.so.3 stands in for that one, so a test loads this library first and asks for "ucx".
// The structures are those of NVSHMEM's plugin interface, version 3.4, declared here from its description.
//
// Environment: COMET_TEST_LINK_GBS is the rate in 1e9 bytes a second (0: unlimited), COMET_TEST_LINK_US the latency.

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

// ---- CUDA's driver, of which only these calls are needed ----

using Address = unsigned long long;
using Stream = void*;
struct IpcHandle {
    char bytes[64];
};
constexpr unsigned int LAZY_PEER_ACCESS = 1, NON_BLOCKING = 1, PORTABLE = 1;

struct Driver {
    int (*ipc_get)(IpcHandle*, Address);
    int (*ipc_open)(Address*, IpcHandle, unsigned int);
    int (*address_range)(Address*, size_t*, Address);
    int (*copy)(Address, Address, size_t, Stream);
    int (*make_stream)(Stream*, unsigned int);
    int (*synchronize)(Stream);
    int (*host_alloc)(void**, size_t, unsigned int);

    bool load() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) return false;
        auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        return find(ipc_get, "cuIpcGetMemHandle") && find(ipc_open, "cuIpcOpenMemHandle_v2") &&
               find(address_range, "cuMemGetAddressRange_v2") && find(copy, "cuMemcpyAsync") &&
               find(make_stream, "cuStreamCreate") && find(synchronize, "cuStreamSynchronize") &&
               find(host_alloc, "cuMemHostAlloc");
    }
};

// ---- NVSHMEM's plugin interface ----

enum Operation { PUT = 1, PUT_WORD = 2, PUT_SIGNAL = 3, GET = 4 };
enum Atomic { SET = 3, SIGNAL = 8, SIGNAL_SET = 9 };
enum Capability { CPU_WRITE = 1 << 4, CPU_READ = 1 << 5, CPU_ATOMICS = 1 << 6 };
constexpr int CONNECTED = 2, FAILED = 1;

struct MemoryHandle {
    char bytes[512];
};
struct Verb {
    int operation, is_nbi, is_stream;
    Stream stream;
};
struct Place {
    void* pointer;
    uint64_t offset;
    MemoryHandle* handle;
};
struct Extent {
    size_t count;
    int element_bytes;
    ptrdiff_t source_stride, target_stride;
};
struct AtomicVerb {
    int operation, is_fetch, is_value, is_compare;
};
struct AtomicPlace {
    Place remote;
    uint64_t return_flag;
    void *returned, *value_at, *compare_at;
    uint64_t value, compare;
    MemoryHandle* return_handle;
};
struct AtomicExtent {
    int type, element_bytes;
};
struct Transport;
struct HostOperations {
    int (*can_reach_peer)(int*, void*, Transport*);
    int (*connect_endpoints)(Transport*, int*, int);
    int (*get_mem_handle)(MemoryHandle*, void*, size_t, Transport*, bool);
    int (*release_mem_handle)(MemoryHandle*, Transport*);
    int (*finalize)(Transport*);
    int (*show_info)(Transport*, int);
    int (*progress)(Transport*);
    int (*rma)(Transport*, int, Verb, Place*, Place*, Extent, int);
    int (*amo)(Transport*, int, void*, AtomicVerb, AtomicPlace*, AtomicExtent, int);
    int (*fence)(Transport*, int, int);
    int (*quiet)(Transport*, int, int);
    int (*enforce_cst)(Transport*);
    int (*enforce_cst_at_target)(Transport*);
    int (*add_device_remote_mem_handles)(Transport*, int, MemoryHandle*, uint64_t, size_t);
};
struct Transport {
    int api_version, type;
    int* capabilities;
    HostOperations operations;
    void *bootstrap, *state, *shared_state, *cache;
    char** pci_paths;
    int attributes, num_devices;
    bool atomics_complete_on_quiet, is_ready, no_proxy;
    void* heap_base;
    size_t log2_granularity;
    uint64_t max_bytes;
    uint32_t atomic_host_endian_min_size;
    int index, my_pe, num_pes;
    void *aliases, *extended;
};

// ---- the emulated link ----

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

struct Word {  // a signal, or a value of 1 to 8 bytes, that has not arrived yet
    Time due;
    Address target;
    uint64_t value;
    size_t bytes;
};

struct Registered {  // what a memory handle holds
    int pid;
    Address base;
    IpcHandle handle;
};
static_assert(sizeof(Registered) <= sizeof(MemoryHandle));

constexpr size_t SLOTS = 1 << 16;  // words on their way to a GPU; a slot is written again after so many others

class Link {
public:
    bool start() {
        const char *rate = getenv("COMET_TEST_LINK_GBS"), *latency = getenv("COMET_TEST_LINK_US");
        bytes_per_ns_ = rate == nullptr ? 0 : atof(rate);
        latency_ = std::chrono::nanoseconds(static_cast<int64_t>(latency == nullptr ? 0 : 1000 * atof(latency)));
        return driver_.load();
    }

    int describe(MemoryHandle* handle, void* memory) {
        Registered found{getpid(), 0, {}};
        size_t bytes = 0;
        const Address address = reinterpret_cast<Address>(memory);
        if (driver_.address_range(&found.base, &bytes, address) != 0) return failed("cuMemGetAddressRange", memory);
        if (driver_.ipc_get(&found.handle, found.base) != 0) return failed("cuIpcGetMemHandle", memory);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &found, sizeof found);
        return 0;
    }

    int copy(const Verb& verb, const Place& remote, const Place& local, size_t bytes) {
        const std::lock_guard<std::mutex> hold(lock_);
        Address there = 0;
        if (!ready() || !map(remote, &there)) return FAILED;
        const Address here = reinterpret_cast<Address>(local.pointer);
        const Time due = occupy(bytes);
        if (verb.operation == PUT_WORD) {
            Word word{due, there, 0, bytes};
            memcpy(&word.value, local.pointer, bytes);
            words_.push_back(word);
            return 0;
        }
        if (verb.operation != PUT && verb.operation != GET) return failed("an operation", &verb);
        const int status = verb.operation == PUT ? driver_.copy(there, here, bytes, stream_)
                                                 : driver_.copy(here, there, bytes, stream_);
        return status == 0 ? 0 : failed("cuMemcpyAsync", remote.pointer);
    }

    int set(int operation, const Place& remote, uint64_t value, size_t bytes) {
        const std::lock_guard<std::mutex> hold(lock_);
        Address there = 0;
        if (operation != SET && operation != SIGNAL && operation != SIGNAL_SET) {
            fprintf(stderr, "the test transport sets words and signals, it has no atomic operation %d\n", operation);
            return FAILED;
        }
        if (!ready() || !map(remote, &there)) return FAILED;
        words_.push_back({occupy(bytes), there, value, bytes});
        return 0;
    }

    int deliver() {  // the words that are due, in order
        const std::lock_guard<std::mutex> hold(lock_);
        return deliver_until(Clock::now());
    }

    int quiet() {
        const std::lock_guard<std::mutex> hold(lock_);
        if (!ready()) return FAILED;
        if (bytes_per_ns_ > 0) std::this_thread::sleep_until(free_ + latency_);
        if (deliver_until(Time::max()) != 0) return FAILED;
        return driver_.synchronize(stream_) == 0 ? 0 : failed("cuStreamSynchronize", nullptr);
    }

    uint64_t bytes() const { return sent_; }

private:
    bool ready() {
        if (stream_ != nullptr) return true;
        return driver_.make_stream(&stream_, NON_BLOCKING) == 0 &&
               driver_.host_alloc(reinterpret_cast<void**>(&slots_), SLOTS * sizeof *slots_, PORTABLE) == 0;
    }

    Time occupy(size_t bytes) {  // when the last byte has arrived
        sent_ += bytes;
        const Time now = Clock::now();
        if (bytes_per_ns_ <= 0) return now + latency_;
        const auto wire = std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(bytes) / bytes_per_ns_));
        free_ = (free_ > now ? free_ : now) + wire;
        return free_ + latency_;
    }

    bool map(const Place& place, Address* address) {
        Registered target;
        memcpy(&target, place.handle, sizeof target);
        Address base = target.base;  // a process cannot open a handle of its own
        if (target.pid != getpid()) {
            const std::string key(target.handle.bytes, sizeof target.handle.bytes);
            auto [entry, is_new] = mapped_.try_emplace(key, 0);
            if (is_new && driver_.ipc_open(&entry->second, target.handle, LAZY_PEER_ACCESS) != 0) {
                mapped_.erase(entry);
                failed("cuIpcOpenMemHandle", place.pointer);
                return false;
            }
            base = entry->second;
        }
        *address = base + (reinterpret_cast<Address>(place.pointer) - target.base);
        return true;
    }

    int deliver_until(Time time) {
        for (; !words_.empty() && words_.front().due <= time; words_.pop_front()) {
            const Word& word = words_.front();
            uint64_t* slot = slots_ + next_++ % SLOTS;
            *slot = word.value;
            if (driver_.copy(word.target, reinterpret_cast<Address>(slot), word.bytes, stream_) != 0)
                return failed("cuMemcpyAsync of a word", slot);
        }
        return 0;
    }

    static int failed(const char* what, const void* at) {
        fprintf(stderr, "the test transport: %s at %p failed\n", what, at);
        return FAILED;
    }

    Driver driver_{};
    std::mutex lock_;
    Stream stream_ = nullptr;
    uint64_t *slots_ = nullptr, next_ = 0, sent_ = 0;
    std::map<std::string, Address> mapped_;
    std::deque<Word> words_;
    Time free_{};
    double bytes_per_ns_ = 0;
    std::chrono::nanoseconds latency_{};
};

Link link_;

}  // namespace

extern "C" uint64_t comet_test_link_bytes() { return link_.bytes(); }

extern "C" int nvshmemt_init(Transport** made, void*, int api_version) {
    if (!link_.start()) return FAILED;
    auto* transport = static_cast<Transport*>(calloc(1, sizeof(Transport)));
    transport->operations = {
        .can_reach_peer = [](int* access, void*, Transport*) {
            *access = CPU_WRITE | CPU_READ | CPU_ATOMICS;
            return 0;
        },
        .connect_endpoints = [](Transport*, int*, int) { return 0; },
        .get_mem_handle = [](MemoryHandle* handle, void* memory, size_t, Transport*, bool) {
            return link_.describe(handle, memory);
        },
        .release_mem_handle = [](MemoryHandle*, Transport*) { return 0; },
        .finalize = [](Transport* transport) {
            free(transport);
            return 0;
        },
        .show_info = [](Transport*, int) { return 0; },
        .progress = [](Transport*) { return link_.deliver(); },
        .rma = [](Transport*, int, Verb verb, Place* remote, Place* local, Extent extent, int) {
            return link_.copy(verb, *remote, *local, extent.count * extent.element_bytes);
        },
        .amo = [](Transport*, int, void*, AtomicVerb verb, AtomicPlace* place, AtomicExtent extent, int) {
            return link_.set(verb.operation, place->remote, place->value, extent.element_bytes);
        },
        .fence = nullptr,  // all that a rank sends arrives in order
        .quiet = [](Transport*, int, int) { return link_.quiet(); },
        .enforce_cst = [](Transport*) { return 0; },
        .enforce_cst_at_target = nullptr,
        .add_device_remote_mem_handles = nullptr,
    };
    transport->attributes = CONNECTED;
    transport->is_ready = true;
    transport->api_version = api_version;
    *made = transport;
    return 0;
}
