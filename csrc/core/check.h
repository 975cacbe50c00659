// Error: C++'s side of npuzero/errors.py. bindings.cpp turns it into the Python class of the same name.
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <utility>

namespace npuzero {

class Error : public std::exception {
 public:
  enum class Kind { Config, Contract, KernelUnavailable, State, OutOfSpace, Collective, Storage };

  Error(Kind kind, std::string subject, std::string expected, std::string got, std::string remedy)
      : kind(kind),
        subject(std::move(subject)),
        expected(std::move(expected)),
        got(std::move(got)),
        remedy(std::move(remedy)),
        text_(this->subject + ": expected " + this->expected + "; got " + this->got + ". " + this->remedy) {}

  const char* what() const noexcept override { return text_.c_str(); }

  // The class in npuzero.errors.
  const char* python_name() const {
    switch (kind) {
      case Kind::Config: return "ConfigError";
      case Kind::Contract: return "ContractError";
      case Kind::KernelUnavailable: return "KernelUnavailable";
      case Kind::State: return "StateError";
      case Kind::OutOfSpace: return "OutOfSpace";
      case Kind::Collective: return "CollectiveError";
      case Kind::Storage: return "StorageError";
    }
    return "NpuZeroError";
  }

  const Kind kind;
  const std::string subject, expected, got, remedy;

 private:
  std::string text_;
};

// For the doors from Python, which anybody may call: a ContractError, which is a ValueError, unless `fine`.
template <class Got>
void require(bool fine, const char* subject, const char* expected, const Got& got) {
  if (fine) return;
  std::ostringstream text;
  text << got;
  throw Error(Error::Kind::Contract, subject, expected, text.str(),
              "Call the function of npuzero that stands before it, which checks what it is given.");
}

}  // namespace npuzero
