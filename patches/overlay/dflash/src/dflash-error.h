// Errors inside libdflash: thrown as dflash_error, turned into a status and a message at the C boundary.

#pragma once

#include "dflash.h"

#include <stdexcept>
#include <string>

struct dflash_error : public std::runtime_error {
    const int status;

    dflash_error(int status, const std::string & what) : std::runtime_error(what), status(status) {}
};

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string dflash_format(const char * fmt, ...);

// message of this thread's latest failure, read by dflash_last_error()
void dflash_set_last_error(const std::string & message);
