// Fibres: many warps in one thread, each with its own stack. A seed determines which fibre runs next and when
// an asynchronous operation happens, so that a run can be repeated.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace mk {

struct Waiters;

struct Fibre {
  jmp_buf context;
  ucontext_t start;
  std::function<void()> body;
  Fibre* next = nullptr;  // the next fibre that waits for the same thing
  Waiters* waiting = nullptr;
  bool begun = false, ended = false, slow = false;
};

// The list of fibres that wait for the same thing.
struct Waiters {
  Fibre* first = nullptr;
};

class Scheduler {
 public:
  Scheduler(uint64_t seed, int fibres)
      : state_(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u),
        bias_(static_cast<Bias>(seed % 4)),
        stack_count_(fibres) {
    void* memory = mmap(nullptr, kStackBytes * stack_count_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("cannot allocate memory for the fibres' stacks");
    stacks_ = static_cast<char*>(memory);
  }
  ~Scheduler() { munmap(stacks_, kStackBytes * stack_count_); }

  void add(std::function<void()> body) {
    char* stack = stacks_ + fibres_.size() * kStackBytes;
    mprotect(stack, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
    auto fibre = std::make_unique<Fibre>();
    fibre->body = std::move(body);
    fibre->slow = bias_ == Bias::kSlowFibres && draw(2) == 0;
    getcontext(&fibre->start);
    fibre->start.uc_stack.ss_sp = stack;
    fibre->start.uc_stack.ss_size = kStackBytes;
    fibre->start.uc_link = nullptr;
    const uint64_t self = reinterpret_cast<uint64_t>(this);
    makecontext(&fibre->start, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
    make_ready(fibre.get());
    fibres_.push_back(std::move(fibre));
    ++live_;
  }

  // Runs until all fibres have ended. If none can continue, it calls `stuck`, which may wake some fibres. If
  // `stuck` returns false, the run is abandoned.
  bool run(const std::function<bool()>& stuck) {
    while (live_ > 0) {
      const size_t ready = ready_[0].size() + ready_[1].size(), operations = operations_.size();
      if (ready + operations == 0) {
        if (!stuck()) return false;
        continue;
      }
      bool operate = ready == 0;
      if (ready > 0 && operations > 0) {
        switch (bias_) {
          case Bias::kLateOperations:
            operate = draw(64) == 0;
            break;
          case Bias::kEarlyOperations:
            operate = draw(4) != 0;
            break;
          default:
            operate = draw(static_cast<uint32_t>(ready + operations)) < operations;
        }
      }
      operate ? run_operation() : resume(take_fibre());
    }
    while (!operations_.empty()) run_operation();
    return true;
  }

  // Called by the running fibre. With a probability of 1/4, the fibre gives way to the scheduler, which may
  // run other fibres before it.
  void pause() {
    if (draw(4) != 0) return;
    make_ready(current_);
    leave();
  }
  // Blocks the running fibre until `waiters` is woken.
  void block(Waiters& waiters) {
    current_->waiting = &waiters;
    current_->next = waiters.first;
    waiters.first = current_;
    leave();
  }
  void wake(Waiters& waiters) {
    for (Fibre* fibre = std::exchange(waiters.first, nullptr); fibre != nullptr;) {
      Fibre* next = std::exchange(fibre->next, nullptr);
      fibre->waiting = nullptr;
      make_ready(fibre);
      fibre = next;
    }
  }
  void wake_all() {
    for (const std::unique_ptr<Fibre>& fibre : fibres_) {
      if (fibre->waiting != nullptr) wake(*fibre->waiting);
    }
  }
  // Schedules an operation for some later time.
  void post(std::function<void()> operation) { operations_.push_back(std::move(operation)); }

 private:
  static constexpr size_t kStackBytes = 128 << 10;  // includes a guard page at the lower end of the stack

  // The kind of schedule, which the seed selects: unbiased, with late or with early asynchronous operations,
  // or with some slow fibres.
  enum class Bias { kNone, kLateOperations, kEarlyOperations, kSlowFibres };

  static void enter(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<Scheduler*>(uint64_t{high} << 32 | low);
    self->current_->body();
    self->current_->ended = true;
    self->leave();
  }
  uint32_t draw(uint32_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>((state_ >> 32) * n >> 32);
  }
  void make_ready(Fibre* fibre) { ready_[fibre->slow].push_back(fibre); }
  // Switches from the running fibre to the scheduler.
  void leave() {
    if (_setjmp(current_->context) == 0) _longjmp(home_, 1);
  }
  void resume(Fibre* fibre) {
    current_ = fibre;
    if (_setjmp(home_) == 0) {
      if (fibre->begun) _longjmp(fibre->context, 1);
      fibre->begun = true;
      setcontext(&fibre->start);
    }
    if (current_->ended) --live_;
    current_ = nullptr;
  }
  Fibre* take_fibre() {
    std::vector<Fibre*>& list =
        ready_[0].empty() || (!ready_[1].empty() && draw(32) == 0) ? ready_[1] : ready_[0];
    std::swap(list[draw(static_cast<uint32_t>(list.size()))], list.back());
    Fibre* fibre = list.back();
    list.pop_back();
    return fibre;
  }
  void run_operation() {
    std::swap(operations_[draw(static_cast<uint32_t>(operations_.size()))], operations_.back());
    const std::function<void()> operation = std::move(operations_.back());
    operations_.pop_back();
    operation();
  }

  uint64_t state_;
  Bias bias_;
  char* stacks_;
  size_t stack_count_;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  std::vector<Fibre*> ready_[2];  // [1]: slow fibres, [0]: the others
  std::vector<std::function<void()>> operations_;
  Fibre* current_ = nullptr;
  jmp_buf home_;
  size_t live_ = 0;
};

}  // namespace mk
