#include "comm/communicator.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

#include "core/check.h"

namespace npuzero::comm {
namespace {

Failure closed_here(int rank) {
  return Failure("closed", rank, "an open communicator", "one that this rank has closed",
                 "Wait for every handle before closing.");
}

// Counts the calling thread among those that wait.
class Waiter {
 public:
  explicit Waiter(std::atomic<int>& waiters) : waiters_(waiters) { ++waiters_; }
  Waiter(const Waiter&) = delete;
  ~Waiter() { --waiters_; }

 private:
  std::atomic<int>& waiters_;
};

}  // namespace

Communicator::Communicator(std::shared_ptr<Region> region, int index, std::vector<int> ranks, std::vector<int> pids,
                           std::string name, double timeout_s)
    : group_(std::move(region), index, std::move(ranks), std::move(pids), std::move(name)),
      peers_(group_, timeout_s),
      verbs_(group_, peers_) {
  group_.region->arrive(index);
}

Communicator::~Communicator() { close(); }

void Communicator::check_process() const {
  if (!inherited()) return;
  throw Error(
      Error::Kind::State, "communicator '" + group_.name + "' on rank " + std::to_string(group_.ranks[group_.index]),
      "the process that opened it", "a forked child of that process",
      "A world does not survive a fork: compute in a world of one there (npuzero.comm.SingleWorld()), or let the "
      "launcher start the process.");
}

OperationPointer Communicator::submit(Request request) {
  check_process();
  auto operation = std::make_shared<Operation>();
  operation->request = std::move(request);
  operation->owner = this;
  std::lock_guard<std::mutex> lock(mutex_);
  operation->sequence = ++submitted_;
  operation->failure = failure();
  if (operation->failure) {
    operation->refused = operation->done = true;
    return operation;
  }
  if (!thread_.joinable()) {
    // Signals are the main thread's: it may hold the handler of an interpreter.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { progress(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  queue_.push_back(operation);
  // A barrier is waited for at once, by a thread that will run it: waking another would only disturb.
  if (operation->request.verb != Verb::barrier) changed_.notify_all();
  return operation;
}

void Communicator::run_front(std::unique_lock<std::mutex>& lock) {
  busy_ = true;  // without the lock nobody else may take the next: operations run one at a time, in their order
  const OperationPointer operation = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  std::optional<Failure> failure;
  operation->begin = Clock::now();
  try {
    verbs_.run(operation->request, operation->sequence);
  } catch (const Failure& found) {
    failure = found;
    peers_.abandon();
  }
  operation->end = Clock::now();
  lock.lock();
  operation->failure = std::move(failure);
  operation->done = true;
  busy_ = false;
  changed_.notify_all();
}

void Communicator::progress() {
  pthread_setname_np(pthread_self(), "npuzero-comm");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    // The thread that waits for an operation may have taken it meanwhile: then there is nothing to do here.
    changed_.wait(lock, [this] { return peers_.closing || (!busy_ && !queue_.empty()); });
    if (peers_.closing) return;
    run_front(lock);
  }
}

bool Communicator::wait(const OperationPointer& operation, const std::function<bool()>& interrupted) {
  check_process();
  const Waiter here(peers_.waiters);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!operation->done) {
    if (!busy_ && !queue_.empty() && !peers_.closing) {
      // This thread has nothing else to do: to run it here saves waking the progress thread, and its answer.
      peers_.interrupted = &interrupted;
      run_front(lock);
      peers_.interrupted = nullptr;
    } else if (changed_.wait_for(lock, std::chrono::milliseconds(slice_ms)) == std::cv_status::timeout) {
      lock.unlock();
      if (interrupted()) return false;
      lock.lock();
    }
  }
  return true;
}

bool Communicator::done(const OperationPointer& operation) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  return operation->done;
}

std::optional<Failure> Communicator::failure() const {
  if (group_.region->failed()) return group_.region->failure();
  if (peers_.closing) return closed_here(group_.ranks[group_.index]);
  return std::nullopt;
}

void Communicator::abort(const Failure& why) { group_.region->fail(why); }

void Communicator::close() {
  if (inherited()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!peers_.closing.exchange(true)) {
    group_.region->leave(group_.index);
    changed_.notify_all();
  }
  changed_.wait(lock, [this] { return !busy_; });  // what runs sees `closing`, and fails
  for (const OperationPointer& operation : queue_) {
    operation->failure = closed_here(group_.ranks[group_.index]);
    operation->done = true;
  }
  queue_.clear();
  changed_.notify_all();
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
}

}  // namespace npuzero::comm
