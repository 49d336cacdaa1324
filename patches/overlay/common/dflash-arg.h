// Command-line options of draft-dflash. Included by arg.cpp.

#pragma once

#include "arg.h"
#include "common.h"

#include "dflash.h"

#include <stdexcept>
#include <string>

inline common_arg dflash_arg_adaptive() {
    common_arg arg(
        {"--spec-draft-adaptive"}, "{on,off}",
        "draft-dflash chooses in every round how many tokens to draft and verify, none included, by what pays; --spec-draft-n-max\n"
        "is the ceiling (default: on). A request with a seed of its own that is verified by rejection keeps the full length, so\n"
        "that it gives the same text again",
        [](common_params & params, const std::string & value) {
            if      (value == "on")  { params.speculative.draft.dflash_adaptive = true;  }
            else if (value == "off") { params.speculative.draft.dflash_adaptive = false; }
            else                     { throw std::invalid_argument("expected on or off"); }
        });
    return arg.set_spec().set_examples({LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI}).set_env("LLAMA_ARG_SPEC_DRAFT_ADAPTIVE");
}

inline common_arg dflash_arg_verify() {
    common_arg arg(
        {"--spec-draft-verify"}, "{auto,reject,match}",
        "how draft-dflash verifies a sampled text (default: auto)\n"
        "- auto: rejection sampling where the request has a fixed distribution at every position, else match; sampled or greedy\n"
        "  draft by running statistics\n"
        "- reject: the same, always with a sampled draft\n"
        "- match: the target samples and the draft must match, so a seed gives the same text as without a draft",
        [](common_params & params, const std::string & value) {
            if      (value == "auto")   { params.speculative.draft.dflash_verify = DFLASH_VERIFY_AUTO;   }
            else if (value == "reject") { params.speculative.draft.dflash_verify = DFLASH_VERIFY_REJECT; }
            else if (value == "match")  { params.speculative.draft.dflash_verify = DFLASH_VERIFY_MATCH;  }
            else                        { throw std::invalid_argument("expected auto, reject or match"); }
        });
    return arg.set_spec().set_examples({LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI}).set_env("LLAMA_ARG_SPEC_DRAFT_VERIFY");
}
