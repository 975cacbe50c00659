// What generated launches call in one of CANN's libraries beside libascendcl: NAME says which. Not what these are
// really called; it is there so that the kernels' library must be linked to it.
#include <cstdlib>

// Whether a kernel was registered; not where FAKE_CANN_UNREGISTERED is set.
extern "C" bool NAME() { return std::getenv("FAKE_CANN_UNREGISTERED") == nullptr; }
