// The acceptance rule of draft-dflash, shared by llama-server, llama-cli and libdflash.
//
// Match rule: at every position the target's own sampler chooses the token, given the accepted prefix. The draft token is
// accepted if it is that very token; the first one that is not ends the block. Each emitted token is therefore chosen by the
// target alone, in text order and exactly once: the text equals plain decoding for any draft, any chain and any seed, as far
// as the target's logits do not depend on the width of the batch.

#pragma once

#include "llama.h"

#include <cstddef>
#include <vector>

// what an end-of-generation token inside the draft does
enum dflash_eog_rule {
    DFLASH_EOG_STOP,          // nothing follows it
    DFLASH_EOG_STOP_NOT_LAST, // nothing follows it unless it is the draft's last token (a replayed draft may end with one)
};

// pick(i): choose and accept the token of row i (0 .. n_draft); is_eog(id): does this token end the text?
// Appends the tokens of the text to `out`; returns how many of them are accepted draft tokens.
template <typename Pick, typename IsEog>
size_t dflash_verify_match(
        const llama_token        * draft,
        size_t                     n_draft,
        dflash_eog_rule            rule,
        Pick                    && pick,
        IsEog                   && is_eog,
        std::vector<llama_token> & out) {
    size_t n_accepted = 0;
    for (size_t i = 0; i <= n_draft; ++i) {
        const llama_token id = pick(i);
        out.push_back(id);

        if (i == n_draft || id != draft[i]) {
            break;
        }
        ++n_accepted;
        if (is_eog(id) && (rule == DFLASH_EOG_STOP || i + 1 < n_draft)) {
            break;
        }
    }
    return n_accepted;
}
