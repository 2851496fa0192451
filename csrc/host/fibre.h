// Fibres: many warps in one thread, each on a stack of its own. Who goes next, and when an asynchronous
// operation happens, is drawn from a seed, so that a run can be repeated.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

namespace mk {

struct Waiters;

struct Fibre {
  jmp_buf context;
  ucontext_t start;
  std::function<void()> body;
  Fibre* next = nullptr;  // of those who wait for the same
  Waiters* waiting = nullptr;
  bool begun = false, ended = false, slow = false;
};

// Who waits for one thing.
struct Waiters {
  Fibre* first = nullptr;
};

class Scheduler {
 public:
  Scheduler(uint64_t seed, int fibres);
  ~Scheduler();

  void add(std::function<void()> body);
  // Until all fibres have ended. Where none can go on: `stuck` may wake some; false: it could not, and the
  // run is given up.
  bool run(const std::function<bool()>& stuck);

  // Of the running fibre. Others may go first:
  void pause();
  // Until it is woken.
  void block(Waiters& waiters);
  void wake(Waiters& waiters);
  void wake_all();
  // Happens at some time from now on.
  void post(std::function<void()> operation) { operations_.push_back(std::move(operation)); }

  Fibre* current() const { return current_; }
  const std::vector<std::unique_ptr<Fibre>>& fibres() const { return fibres_; }
  int64_t switches() const { return switches_; }

 private:
  // What a seed prefers, besides chance.
  enum class Bias { kNone, kLateOperations, kEarlyOperations, kSlowFibres };

  static void enter(unsigned high, unsigned low);
  uint32_t draw(uint32_t n);
  void make_ready(Fibre* fibre) { ready_[fibre->slow].push_back(fibre); }
  void leave();  // the running fibre, for the scheduler
  void resume(Fibre* fibre);
  Fibre* take_fibre();
  void run_operation();

  uint64_t state_;
  Bias bias_;
  char* stacks_;
  size_t stack_bytes_, stack_count_;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  std::vector<Fibre*> ready_[2];  // others, slow ones
  std::vector<std::function<void()>> operations_;
  Fibre* current_ = nullptr;
  jmp_buf home_;
  size_t live_ = 0;
  int64_t switches_ = 0;
};

}  // namespace mk
