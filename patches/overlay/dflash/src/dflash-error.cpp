#include "dflash-error.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

static std::string & dflash_last_error_storage() {
    static thread_local std::string message;
    return message;
}

std::string dflash_format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list copy;
    va_copy(copy, args);
    const int n = vsnprintf(nullptr, 0, fmt, copy);
    va_end(copy);

    std::vector<char> buf(n < 0 ? 1 : (size_t) n + 1);
    if (n >= 0) {
        vsnprintf(buf.data(), buf.size(), fmt, args);
    }
    va_end(args);

    return std::string(buf.data(), n < 0 ? 0 : (size_t) n);
}

void dflash_set_last_error(const std::string & message) {
    try {
        dflash_last_error_storage() = message;
    } catch (...) {
        // out of memory while reporting: keep the status, lose the text
        dflash_last_error_storage().clear();
    }
}

const char * dflash_last_error(void) {
    return dflash_last_error_storage().c_str();
}

const char * dflash_status_name(int status) {
    switch (status) {
        case DFLASH_OK:         return "ok";
        case DFLASH_E_ARGUMENT: return "argument";
        case DFLASH_E_FILE:     return "file";
        case DFLASH_E_PAIR:     return "pair";
        case DFLASH_E_TARGET:   return "target";
        case DFLASH_E_MEMORY:   return "memory";
        case DFLASH_E_DECODE:   return "decode";
        case DFLASH_E_INTERNAL: return "internal";
        default:                return "unknown";
    }
}
