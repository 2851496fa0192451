// Fibres: threads in user space. The code that resumes a fibre continues when the fibre passes or ends.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <functional>
#include <stdexcept>

// Reserves memory. The operating system provides it page by page, on first use.
inline char* reserve(size_t bytes) {
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot reserve memory for a launch");
  return static_cast<char*>(memory);
}

class Fibre {
 public:
  Fibre(char* stack, size_t bytes, std::function<void()> body) : body_(std::move(body)) {
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack;
    start_.uc_stack.ss_size = bytes;
    start_.uc_link = nullptr;
    makecontext(&start_, enter, 0);
  }
  void resume() {
    current_ = this;
    if (_setjmp(home_) != 0) return;
    if (begun_) _longjmp(here_, 1);
    begun_ = true;
    setcontext(&start_);
  }
  // Only the running fibre may call it.
  static void pass() {
    if (_setjmp(current_->here_) == 0) _longjmp(home_, 1);
  }
  bool ended() const { return ended_; }

 private:
  static void enter() {
    current_->body_();
    current_->ended_ = true;
    pass();
  }

  static inline thread_local Fibre* current_;
  static inline thread_local jmp_buf home_;
  jmp_buf here_;
  ucontext_t start_;
  std::function<void()> body_;
  bool begun_ = false, ended_ = false;
};
