// What draft-dflash keeps for one slot of the server: how the current request is verified, the distributions its draft was
// drawn from, and counters for its timings.

#pragma once

#include "dflash-reject.h"
#include "dflash.h"

#include <cstdint>
#include <string>
#include <vector>

// counters of one request; part of every task result, so small and flat
struct dflash_request_stats {
    enum { N_POS = 32 };

    uint32_t n_rounds        = 0;
    uint32_t n_rounds_reject = 0; // verified by rejection sampling
    uint32_t n_rounds_greedy = 0; // of these, with a greedy draft
    uint32_t n_skipped       = 0; // rounds without a draft because it would not have paid

    uint32_t n_drafted_per_pos [N_POS] = {};
    uint32_t n_accepted_per_pos[N_POS] = {};

    void add_round(size_t n_drafted, size_t n_accepted, bool reject, bool greedy) {
        n_rounds++;
        n_rounds_reject += reject;
        n_rounds_greedy += reject && greedy;
        for (size_t i = 0; i < n_drafted && i < N_POS; ++i) {
            n_drafted_per_pos [i]++;
            n_accepted_per_pos[i] += i < n_accepted;
        }
    }

    // extends the timings of a response
    template <typename Json>
    void add_to_json(Json & timings) const {
        if (n_rounds == 0 && n_skipped == 0) {
            return;
        }
        size_t n = 0;
        while (n < N_POS && n_drafted_per_pos[n] > 0) {
            ++n;
        }
        timings["draft_n_rounds"]            = n_rounds;
        timings["draft_n_rounds_reject"]     = n_rounds_reject;
        timings["draft_n_rounds_greedy"]     = n_rounds_greedy;
        timings["draft_n_skipped"]           = n_skipped;
        timings["draft_rule"]                = n_rounds_reject > 0 ? "reject" : "match";
        timings["draft_n_per_pos"]           = std::vector<uint32_t>(n_drafted_per_pos,  n_drafted_per_pos  + n);
        timings["draft_n_accepted_per_pos"]  = std::vector<uint32_t>(n_accepted_per_pos, n_accepted_per_pos + n);
    }
};

// counters of all requests since the server started, for /metrics
struct dflash_metrics {
    uint64_t n_rounds        = 0;
    uint64_t n_rounds_reject = 0;
    uint64_t n_skipped       = 0;

    uint64_t n_drafted_per_pos [dflash_request_stats::N_POS] = {};
    uint64_t n_accepted_per_pos[dflash_request_stats::N_POS] = {};

    void add(const dflash_request_stats & request) {
        n_rounds        += request.n_rounds;
        n_rounds_reject += request.n_rounds_reject;
        n_skipped       += request.n_skipped;
        for (size_t i = 0; i < dflash_request_stats::N_POS; ++i) {
            n_drafted_per_pos [i] += request.n_drafted_per_pos [i];
            n_accepted_per_pos[i] += request.n_accepted_per_pos[i];
        }
    }

    // Prometheus text: rounds by rule, and how many tokens a round gave (its accepted drafts and the target's own)
    template <typename Stream>
    void write(Stream & out) const {
        if (n_skipped > 0) {
            const char * skipped = "llamacpp:spec_decode_skipped_total";
            out << "# HELP " << skipped << " Rounds without a draft because it would not have paid\n# TYPE " << skipped << " counter\n"
                << skipped << " " << n_skipped << "\n";
        }
        if (n_rounds == 0) {
            return;
        }
        const char * rounds = "llamacpp:spec_decode_rounds_total";
        out << "# HELP " << rounds << " Verification steps by the rule that accepted\n# TYPE " << rounds << " counter\n"
            << rounds << "{rule=\"match\"} "  << n_rounds - n_rounds_reject << "\n"
            << rounds << "{rule=\"reject\"} " << n_rounds_reject            << "\n";
        const char * length = "llamacpp:spec_decode_accepted_length";
        out << "# HELP " << length << " Tokens per verification step\n# TYPE " << length << " histogram\n";
        uint64_t sum = n_rounds;
        for (size_t i = 0; i < dflash_request_stats::N_POS && n_drafted_per_pos[i] > 0; ++i) {
            // at most i + 1 tokens: all rounds but those that accepted the draft at position i
            out << length << "_bucket{le=\"" << i + 1 << "\"} " << n_rounds - n_accepted_per_pos[i] << "\n";
            sum += n_accepted_per_pos[i];
        }
        out << length << "_bucket{le=\"+Inf\"} " << n_rounds << "\n"
            << length << "_sum " << sum << "\n" << length << "_count " << n_rounds << "\n";
    }
};

// probabilities of one emitted token, kept because the next row overwrites the sampler's candidates
struct dflash_token_probs {
    float p = 0.0f;
    std::vector<llama_token_data> top;
};

struct dflash_slot {
    // of the request
    bool            reject = false;   // p exists and may be used
    int32_t         mode   = DFLASH_VERIFY_AUTO;
    llama_sampler * chain  = nullptr;
    dflash_rng      rng;              // never copied with the sampler: a restored checkpoint must not repeat its numbers

    bool            fixed  = false;   // draft the full length: the text shall repeat with its seed
    dflash_request_stats * stats = nullptr;

    // of the round
    std::vector<dflash_q_row> q;
    size_t                    n_drafted = 0;
    std::vector<int>          i_rows;     // rows of the verification batch
    int                       n_ahead   = 0; // tokens that the prompt counts already and the text does not: they end no text early
    std::vector<dflash_token_probs> probs;

    dflash_overlap overlap;           // of the request, guides DFLASH_VERIFY_AUTO

    bool greedy_draft() const { return mode == DFLASH_VERIFY_AUTO && overlap.prefer_greedy(); }
};
