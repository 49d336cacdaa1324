// dflash.h - C API of the DFlash toolkit: block-diffusion speculative decoding on top of llama.cpp
//
// A session ties a target `llama_context`, which the caller created and keeps, to a draft model that the session loads.
// One round of `dflash_session_step` drafts a block, verifies it with one pass of the target and returns the accepted
// tokens. The text is the target's own: greedy output equals plain decoding by the same build, and sampling follows the
// caller's `llama_sampler` chain token by token.
//
// Conventions
//  * Every function returns a `dflash_status` unless stated otherwise. On failure `dflash_last_error()` of the same thread
//    explains: what was found, what was expected, what to do. No exception, abort or assertion leaves the library for
//    anything that a file or an argument can cause.
//  * A session is not thread-safe: one thread at a time may use a session and its target context.
//  * Structs start with their own size so that later versions can append members: always fill them with the matching
//    `*_default()` / set `size` first.
//  * The target context must outlive the session. Between calls the caller may use the target freely; if it changes the
//    memory of the session's sequence it must say so with `dflash_session_rollback`.

#ifndef DFLASH_H
#define DFLASH_H

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    if defined(DFLASH_BUILD)
#        define DFLASH_API __declspec(dllexport)
#    else
#        define DFLASH_API __declspec(dllimport)
#    endif
#else
#    define DFLASH_API __attribute__((visibility("default")))
#endif

#define DFLASH_API_VERSION 3

// longest block a draft may have; the per-position statistics have one counter per drafted token
#define DFLASH_MAX_DRAFT 63

#ifdef __cplusplus
extern "C" {
#endif

enum dflash_status {
    DFLASH_OK           = 0,
    DFLASH_E_ARGUMENT   = 1, // an argument is null, out of range, or the call comes at the wrong time
    DFLASH_E_FILE       = 2, // a file is missing, unreadable, damaged or not a GGUF
    DFLASH_E_PAIR       = 3, // draft and target do not fit; one reason per line in dflash_last_error()
    DFLASH_E_TARGET     = 4, // the target context cannot be used for speculation (settings, pooling, encoder, ...)
    DFLASH_E_MEMORY     = 5, // no memory, or the target's context is full
    DFLASH_E_DECODE     = 6, // a forward pass failed or was aborted
    DFLASH_E_INTERNAL   = 7, // a bug: please report it with the message
};

// How drafts are verified. Both rules leave the text's distribution exactly the target's.
enum dflash_verify {
    DFLASH_VERIFY_AUTO   = 0, // rejection sampling where it applies; draft sampled or greedy, whichever running statistics favour
    DFLASH_VERIFY_REJECT = 1, // rejection sampling where it applies, always with a sampled draft
    DFLASH_VERIFY_MATCH  = 2, // the target samples and the draft must match: a seed gives the same text as without a draft
};

struct dflash_session;

// the reason of this thread's latest failure; "" if there was none. Valid until the next call on this thread.
DFLASH_API const char * dflash_last_error(void);

// short name of a status, e.g. "pair"; "unknown" for other numbers
DFLASH_API const char * dflash_status_name(int status);

// DFLASH_API_VERSION of the library that is loaded
DFLASH_API int dflash_api_version(void);

// JSON object: library version, llama.cpp base commit, patch-set key, compiler, ops. Static storage.
DFLASH_API const char * dflash_build_info(void);

// ---------------------------------------------------------------------------------------------------------------------
// Does a draft fit a target? Only file headers are read, nothing is allocated for weights.

// Compare two GGUF files. DFLASH_OK: they fit. DFLASH_E_PAIR: every reason, one per line, in dflash_last_error().
DFLASH_API int dflash_check_pair(const char * target_path, const char * draft_path);

// The same for a target that is already loaded.
DFLASH_API int dflash_check_model(const struct llama_model * target, const char * draft_path);

// ---------------------------------------------------------------------------------------------------------------------
// Session

struct dflash_params {
    size_t  size;            // sizeof(struct dflash_params)
    int32_t n_draft;         // tokens to draft per round, 1 .. block - 1; 0 = block - 1
    int32_t n_threads;       // threads of the draft's small batches; 0 = as the target
    int32_t n_threads_batch; // threads of prompt injection; 0 = as the target
    int32_t n_gpu_layers;    // draft layers on the GPU; negative = all
    float   p_min;           // stop a draft before the first token whose probability among its candidates is lower; 0 = never
    bool    use_mmap;        // map the draft file instead of reading it
    bool    trace;           // record hidden states, logits, candidates and scores of every round (slow; see dflash_session_trace)
    int32_t type_k;          // ggml_type of the draft's key cache; negative = f16
    int32_t type_v;          // ggml_type of the draft's value cache; negative = f16
    int32_t flash_attn;      // llama_flash_attn_type of the draft: -1 = auto, 0 = off, 1 = on
    int32_t verify;          // dflash_verify: the acceptance rule when sampling
    bool    adaptive;        // choose how many tokens to draft and verify, 0 included, by what pays; n_draft is the ceiling.
                             // With false every round drafts n_draft tokens.
};

DFLASH_API struct dflash_params dflash_params_default(void);

// Load the draft at `draft_path` and attach it to `target`. Checks the pair first. On success *out is a new session;
// on failure *out is NULL and nothing is left behind.
//  * the target must be a text decoder without pooling; sequence 0 is the one that is speculated on
//  * the memory of sequence 0 may already hold tokens; the draft then starts without features for them
DFLASH_API int dflash_session_open(
        struct llama_context       *  target,
        const char                 *  draft_path,
        const struct dflash_params *  params,   // NULL = defaults
        struct dflash_session      ** out);

// Free the session and its draft; the target's settings are put back. NULL is allowed.
DFLASH_API void dflash_session_close(struct dflash_session * session);

// facts about the open pair
DFLASH_API int32_t dflash_session_n_draft   (const struct dflash_session * session); // tokens drafted per round at most
DFLASH_API int32_t dflash_session_block_size(const struct dflash_session * session);
DFLASH_API int32_t dflash_session_n_past    (const struct dflash_session * session); // tokens in the sequence that are valid

// Change params.adaptive between rounds. Adaptive lengths follow measured time: where tokens are accepted by rejection
// sampling, a seed then need not give the same text twice (greedy text and DFLASH_VERIFY_MATCH do not depend on lengths).
DFLASH_API int dflash_session_set_adaptive(struct dflash_session * session, bool adaptive);

// Keep the first `n_keep` tokens of the sequence (0 <= n_keep <= n_past), drop the rest in target and draft. A target with
// recurrent layers can go back only a few tokens: DFLASH_E_MEMORY then, after which only n_keep = 0 is possible.
DFLASH_API int dflash_session_rollback(struct dflash_session * session, int32_t n_keep);

// Append `n_tokens` prompt tokens at n_past: decode them in the target and feed the draft. After success the target holds
// the logits of the last token (llama_get_logits_ith(target, -1)). Chunks of the target's n_batch.
DFLASH_API int dflash_session_prompt(struct dflash_session * session, const llama_token * tokens, int32_t n_tokens);

// Tell the session that the caller itself has just decoded `n_tokens` tokens at n_past by ONE llama_decode call with
// sequence 0: the draft takes its features from that call. For callers that keep their own decode loop.
DFLASH_API int dflash_session_decoded(struct dflash_session * session, int32_t n_tokens);

// One round. `id_last` is the last token of the text, sampled but not yet in the target's memory. Drafts at most
// min(n_draft, n_draft_max) tokens (n_draft_max < 0 = no further limit, 0 = plain decoding), verifies them and writes the
// next *n_out (>= 1) tokens of the text to `out`: first the accepted draft tokens, then the target's own token. After an
// end-of-generation token nothing follows. `sampler` chooses every token (llama_sampler_sample: apply and accept), in text
// order and exactly once per emitted token, so that penalties, grammars and random streams advance as in plain decoding.
// If the chain ends in a plain draw (`dist`) after samplers that leave a fixed distribution, and params.verify allows it,
// tokens are accepted by rejection sampling instead; mirostat, XTC, grammars, custom samplers and greedy chains always match.
// Afterwards n_past counts all tokens before the last of `out`.
DFLASH_API int dflash_session_step(
        struct dflash_session * session,
        struct llama_sampler  * sampler,
        llama_token             id_last,
        int32_t                 n_draft_max,
        llama_token           * out,
        int32_t                 capacity,   // of `out`, >= 1; limits the draft too
        int32_t               * n_out);

// ---------------------------------------------------------------------------------------------------------------------
// Statistics

struct dflash_stats {
    size_t  size;                                 // sizeof(struct dflash_stats)
    int64_t n_rounds;                             // rounds that drafted at least one token
    int64_t n_plain;                              // rounds without a draft, for whatever reason
    int64_t n_drafted;                            // tokens proposed
    int64_t n_accepted;                           // of these, accepted
    int64_t n_emitted;                            // tokens returned by dflash_session_step
    int64_t n_replayed;                           // tokens decoded again after a restored checkpoint
    int64_t n_invalid;                            // drafts thrown away because the draft model produced no valid token
    int64_t n_prompt;                             // prompt tokens decoded or reported
    int64_t n_injected;                           // positions whose features the draft has taken; a windowed draft leaves out
                                                  // what it would not look at again
    double  t_prompt_ms;                          // target prompt passes
    double  t_inject_ms;                          // feature injection into the draft
    double  t_draft_ms;                           // draft passes and selection
    double  t_verify_ms;                          // target verification passes
    double  t_sample_ms;                          // sampling of the visited rows
    int64_t n_drafted_per_pos [DFLASH_MAX_DRAFT]; // drafts that reached position i
    int64_t n_accepted_per_pos[DFLASH_MAX_DRAFT]; // drafts whose token at position i was accepted
    int64_t n_rounds_reject;                      // rounds verified by rejection sampling
    int64_t n_rounds_greedy;                      // of these, with a greedy draft
    int64_t n_visited;                            // positions where target and draft distributions were compared
    double  sum_overlap;                          // over these: sum of min(p, q), the acceptance of a sampled draft
    double  sum_top;                              // over these: p of the draft's likeliest token, the acceptance of a greedy one
    double  sum_reach;                            // over these: p of all candidates together, what no draft from them can exceed
    int64_t n_skipped;                            // rounds without a draft because it would not have paid (of n_plain)
    double  pace_plain_ms;                        // learned so far: a round without a draft, ms; 0 = not yet known
    double  pace_draft_ms;                        // a draft
    double  pace_gain_ms;                         // what a draft saves before its own cost, lately
};

// fill `stats` (its `size` must be set)
DFLASH_API int dflash_session_stats(const struct dflash_session * session, struct dflash_stats * stats);
DFLASH_API int dflash_session_stats_reset(struct dflash_session * session);

// ---------------------------------------------------------------------------------------------------------------------
// Trace of the latest round (sessions opened with params.trace). Pointers are valid until the next call on the session.

struct dflash_trace {
    size_t                size;       // sizeof(struct dflash_trace)
    int32_t               n_pos;      // drafted positions with data (may exceed n_draft after p_min or an end token)
    int32_t               n_draft;    // tokens proposed
    int32_t               n_accepted; // of these, accepted
    int32_t               n_top_k;    // candidates per position; 0 for a draft without selector
    int32_t               n_embd;     // width of a hidden row
    int32_t               n_vocab;    // width of a logits row
    llama_pos             pos;        // position of the anchor
    llama_token           anchor;
    const llama_token   * draft;      // [n_draft]
    const llama_token   * candidates; // [n_pos][n_top_k], by descending logit, ties by lower id
    const float         * scores;     // [n_pos][n_top_k] along the chosen path: logit + bilinear term
    const float         * lattice;    // [n_pos][n_top_k predecessors][n_top_k candidates]; row 0: all predecessors are the anchor
    const float         * hidden;     // [n_pos][n_embd] final normalised hidden states
    const float         * logits;     // [n_pos][n_vocab] after output multiplier and soft cap
};

DFLASH_API int dflash_session_trace(const struct dflash_session * session, struct dflash_trace * trace);

#ifdef __cplusplus
}
#endif

#endif // DFLASH_H
