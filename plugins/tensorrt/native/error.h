// How the C functions of this library fail: they return 1 or null, and pensieve_error says why.
#pragma once
#include <exception>
#include <string>

namespace pensieve {

std::string& last_error();  // of this thread

template <class Call>
int guarded(Call call) {
  try {
    call();
    return 0;
  } catch (std::exception const& error) {
    last_error() = error.what();
    return 1;
  }
}

}  // namespace pensieve
