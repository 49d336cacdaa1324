// The C API: one target context, one draft, sequence 0.

#include "dflash.h"

#include "dflash-check.h"
#include "dflash-draft.h"
#include "dflash-error.h"
#include "dflash-verify.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

// defined by the build: commit of the base, key of the patch set
#ifndef DFLASH_BASE_COMMIT
#define DFLASH_BASE_COMMIT "unknown"
#endif
#ifndef DFLASH_PATCH_KEY
#define DFLASH_PATCH_KEY "unknown"
#endif
#ifndef DFLASH_VERSION
#define DFLASH_VERSION "0.0.0"
#endif

struct dflash_model_deleter {
    void operator()(llama_model * m) const { llama_model_free(m); }
};

struct dflash_context_deleter {
    void operator()(llama_context * c) const { llama_free(c); }
};

// how a target takes back tokens
enum dflash_rewind {
    DFLASH_REWIND_CUT,        // plain KV cache: any suffix
    DFLASH_REWIND_SNAPSHOT,   // recurrent layers with snapshots: up to n_rs_seq tokens, once per decode
    DFLASH_REWIND_CHECKPOINT, // recurrent layers without: restore a saved state and decode again
};

struct dflash_session {
    llama_context     * ctx   = nullptr;
    const llama_vocab * vocab = nullptr;

    dflash_tap        tap;
    dflash_trace_data trace;
    bool              tracing = false;

    // destroyed bottom-up: the drafter puts settings back while the contexts live
    std::unique_ptr<llama_model,   dflash_model_deleter>   model_dft;
    std::unique_ptr<llama_context, dflash_context_deleter> ctx_dft;
    std::unique_ptr<dflash_drafter>                        drafter;

    int32_t n_draft    = 0;
    int32_t n_vocab    = 0;
    int32_t n_past     = 0;
    int32_t n_accepted = 0; // of the latest round
    float   p_min      = 0.0f;
    int32_t verify     = DFLASH_VERIFY_AUTO;

    dflash_rng     rng;
    bool           rng_seeded = false;
    dflash_overlap overlap;       // guides DFLASH_VERIFY_AUTO within one text
    dflash_overlap overlap_stats; // as it was when the statistics were reset

    dflash_rewind rewind = DFLASH_REWIND_CUT;
    int32_t       n_latest = 0; // tokens of the target's latest decode, as long as they are its end; 0 = unknown

    // DFLASH_REWIND_CHECKPOINT: state before the latest round and the tokens decoded since
    std::vector<uint8_t>     ckpt;
    llama_pos                ckpt_pos = -1;
    std::vector<llama_token> ckpt_tokens;

    dflash_stats stats = {};
    int64_t n_injected_old  = 0;   // of the drafter, when the statistics were reset
    double  ms_inject_old   = 0.0;

    llama_batch batch = {}; // capacity batch_cap
    int32_t     batch_cap = 0;

    std::vector<llama_token_data>   cur;
    std::vector<dflash_feature_row> rows;
    std::vector<dflash_request>     requests;
    std::vector<llama_token>        text;

    ~dflash_session() {
        if (batch.token) {
            llama_batch_free(batch);
        }
    }

    llama_pos pos_end() const { return llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1; }

    void decode(const llama_token * tokens, int32_t n, llama_pos pos, bool all_logits);
    void cut   (llama_pos n_keep);
    void inject(int32_t n_rows, llama_pos pos);
    void prompt(const llama_token * tokens, int32_t n_tokens);
    void step  (llama_sampler * sampler, llama_token id_last, int32_t n_want, int32_t capacity);

    llama_token sample(llama_sampler * sampler, int32_t i_row, const dflash_q_row * q);
};

// ---------------------------------------------------------------------------------------------------------------------

static double dflash_ms_since(int64_t t_us) {
    return 1e-3 * (double) (ggml_time_us() - t_us);
}

void dflash_session::decode(const llama_token * tokens, int32_t n, llama_pos pos, bool all_logits) {
    if (n > batch_cap) {
        throw dflash_error(DFLASH_E_INTERNAL, dflash_format("%d tokens for a batch of %d", n, batch_cap));
    }

    batch.n_tokens = n;
    for (int32_t i = 0; i < n; ++i) {
        batch.token   [i]    = tokens[i];
        batch.pos     [i]    = pos + i;
        batch.n_seq_id[i]    = 1;
        batch.seq_id  [i][0] = 0;
        batch.logits  [i]    = all_logits || i == n - 1;
    }

    n_latest = 0;
    const int32_t rc = llama_decode(ctx, batch);
    if (rc == 1) {
        throw dflash_error(DFLASH_E_MEMORY, dflash_format("the target's context of %u tokens is full at position %d", llama_n_ctx_seq(ctx), pos));
    }
    if (rc == 2) {
        throw dflash_error(DFLASH_E_DECODE, "the target's forward pass was aborted by its abort callback");
    }
    if (rc != 0) {
        throw dflash_error(DFLASH_E_DECODE, dflash_format("the target's forward pass of %d tokens at position %d failed (code %d)", n, pos, rc));
    }
    llama_synchronize(ctx);
    n_latest   = n;
}

// make the target's memory end at n_keep
void dflash_session::cut(llama_pos n_keep) {
    if (pos_end() <= n_keep) {
        return;
    }
    llama_memory_t mem = llama_get_memory(ctx);

    if (n_keep == 0 || rewind != DFLASH_REWIND_CHECKPOINT) {
        // a decode of n tokens writes the states after its last n tokens only: older snapshots belong to other positions,
        // which llama_memory_seq_rm does not know
        const bool stale = rewind == DFLASH_REWIND_SNAPSHOT && n_keep > 0 && pos_end() - n_keep >= n_latest;
        n_latest = 0;
        if (stale || !llama_memory_seq_rm(mem, 0, n_keep, -1)) {
            throw dflash_error(DFLASH_E_MEMORY, dflash_format(
                    "the target's recurrent layers cannot go back from position %d to %d (%u snapshots); start again from position 0",
                    pos_end(), n_keep, llama_n_rs_seq(ctx)));
        }
        ckpt_pos = -1;
        return;
    }

    if (ckpt_pos < 0 || ckpt_pos > n_keep || n_keep - ckpt_pos > (llama_pos) ckpt_tokens.size()) {
        throw dflash_error(DFLASH_E_MEMORY, dflash_format(
                "the target's recurrent layers cannot go back to position %d: the only saved state is at %d; start again from position 0", n_keep, ckpt_pos));
    }
    if (llama_state_seq_set_data_ext(ctx, ckpt.data(), ckpt.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != ckpt.size()) {
        throw dflash_error(DFLASH_E_MEMORY, "the target's saved state could not be restored; start again from position 0");
    }
    llama_memory_seq_rm(mem, 0, ckpt_pos, -1);

    // tokens that were already decided are decoded again, never sampled again
    const int32_t n_again = n_keep - ckpt_pos;
    if (n_again > 0) {
        const int64_t t_us = ggml_time_us();
        decode(ckpt_tokens.data(), n_again, ckpt_pos, false);
        stats.t_verify_ms += dflash_ms_since(t_us);
        stats.n_replayed  += n_again;
        drafter->ms_extra += dflash_ms_since(t_us);
    }
}

// features of the first n_rows rows of the latest decode, which started at pos
void dflash_session::inject(int32_t n_rows, llama_pos pos) {
    rows.resize(n_rows);
    for (int32_t i = 0; i < n_rows; ++i) {
        rows[i] = { i, pos + i, 0 };
    }
    drafter->inject(rows.data(), rows.size());
}

void dflash_session::prompt(const llama_token * tokens, int32_t n_tokens) {
    cut(n_past);
    rng_seeded = false;
    drafter->pace.restart(0);

    for (int32_t beg = 0; beg < n_tokens; beg += batch_cap) {
        const int32_t n    = std::min(batch_cap, n_tokens - beg);
        const int64_t t_us = ggml_time_us();

        decode(tokens + beg, n, n_past, false);
        stats.t_prompt_ms += dflash_ms_since(t_us);
        stats.n_prompt    += n;

        inject(n, n_past);
        n_past  += n;
        ckpt_pos = -1;
    }
}

// the chain chooses the token of a row and takes note of it; with `q` the draft token of that row is accepted or replaced
llama_token dflash_session::sample(llama_sampler * sampler, int32_t i_row, const dflash_q_row * q) {
    const llama_token device = llama_get_sampled_token_ith(ctx, i_row);
    if (device != LLAMA_TOKEN_NULL) {
        return llama_sampler_sample(sampler, ctx, i_row);
    }

    const float * logits = llama_get_logits_ith(ctx, i_row);
    if (!logits) {
        throw dflash_error(DFLASH_E_INTERNAL, dflash_format("the target returned no logits for row %d", i_row));
    }
    cur.resize(n_vocab);
    for (int32_t i = 0; i < n_vocab; ++i) {
        cur[i] = { i, logits[i], 0.0f };
    }

    llama_token_data_array arr = { cur.data(), cur.size(), -1, false };
    llama_sampler_apply(sampler, &arr);
    if (arr.selected < 0 || arr.selected >= (int64_t) arr.size) {
        throw dflash_error(DFLASH_E_ARGUMENT, "the sampler chain chose no token: it must end with a selecting sampler (greedy, dist, mirostat)");
    }
    if (q) {
        dflash_couple(arr, *q, rng, &overlap);
    }
    const llama_token id = arr.data[arr.selected].id;
    llama_sampler_accept(sampler, id);
    return id;
}

void dflash_session::step(llama_sampler * sampler, llama_token id_last, int32_t n_want, int32_t capacity) {
    text.clear();
    n_accepted = 0;

    if (pos_end() < n_past) {
        throw dflash_error(DFLASH_E_ARGUMENT, dflash_format(
                "the target's memory ends at %d although the session counts %d tokens: tell it about changes with dflash_session_rollback", pos_end(), n_past));
    }
    cut(n_past);

    // room for the anchor and the draft, in the context, in one batch and in the caller's array
    const int32_t n_room = std::min<int32_t>((int32_t) llama_n_ctx_seq(ctx) - n_past, batch_cap);
    if (n_room < 1) {
        throw dflash_error(DFLASH_E_MEMORY, dflash_format("the target's context of %u tokens is full", llama_n_ctx_seq(ctx)));
    }
    int32_t n_max = n_want < 0 ? n_draft : std::min(n_draft, n_want);
    n_max = std::min({ n_max, n_room - 1, capacity - 1 });

    requests.resize(1);
    auto & req = requests[0];
    req.seq_id = 0;
    req.pos    = n_past;
    req.anchor = id_last;
    req.n_max  = std::max(0, n_max);
    req.chain  = nullptr;
    req.rng    = &rng;
    req.greedy = false;
    req.tokens.clear();
    req.q.clear();

    if (req.n_max > 0 && verify != DFLASH_VERIFY_MATCH && dflash_chain_has_distribution(sampler)) {
        if (!rng_seeded) {
            // a stream of its own per text, apart from the chain's and reproducible with its seed
            rng.seed(((uint64_t) llama_sampler_get_seed(sampler) << 32) ^ (uint64_t) n_past ^ UINT64_C(0x9e3779b97f4a7c15));
            rng_seeded = true;
            overlap.restart();
        }
        req.chain  = sampler;
        req.greedy = verify == DFLASH_VERIFY_AUTO && overlap.prefer_greedy();
    }

    const bool paced = drafter->adaptive && req.n_max > 0;
    if (req.n_max > 0) {
        const int64_t t_us      = ggml_time_us();
        const double  ms_inject = drafter->ms_inject();
        trace.n_pos = 0;
        trace.draft.clear();
        try {
            drafter->draft(requests, p_min);
        } catch (const dflash_error & err) {
            if (err.status != DFLASH_E_DECODE) {
                throw;
            }
            req.tokens.clear();
            req.invalid = true;
            drafter->rollback(0, 0);
        }
        stats.n_invalid += req.invalid;

        // what follows an end-of-generation token would never be used
        for (size_t i = 0; i < req.tokens.size(); ++i) {
            if (llama_vocab_is_eog(vocab, req.tokens[i])) {
                req.tokens.resize(i + 1);
                req.q.resize(std::min(req.q.size(), i + 1));
                break;
            }
        }
        trace.draft = req.tokens;
        stats.t_draft_ms += dflash_ms_since(t_us) - (drafter->ms_inject() - ms_inject);
        stats.n_skipped  += paced && req.tokens.empty() && !req.invalid;
    }
    const int32_t n_drafted = (int32_t) req.tokens.size();

    // verify
    text.reserve(n_drafted + 1);
    std::vector<llama_token> block;
    block.reserve(n_drafted + 1);
    block.push_back(id_last);
    block.insert(block.end(), req.tokens.begin(), req.tokens.end());

    const int64_t t_round = ggml_time_us();
    int64_t t_us = t_round;
    if (rewind == DFLASH_REWIND_CHECKPOINT && n_drafted > 0) {
        ckpt.resize(llama_state_seq_get_size_ext(ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
        if (llama_state_seq_get_data_ext(ctx, ckpt.data(), ckpt.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != ckpt.size()) {
            throw dflash_error(DFLASH_E_MEMORY, "the target's state could not be saved before verification");
        }
        ckpt_pos    = n_past;
        ckpt_tokens = block;
    } else {
        ckpt_pos = -1;
    }
    decode(block.data(), (int32_t) block.size(), n_past, true);
    stats.t_verify_ms += dflash_ms_since(t_us);

    t_us = ggml_time_us();
    n_accepted = (int32_t) dflash_verify_match(req.tokens.data(), req.tokens.size(), DFLASH_EOG_STOP,
            [&](size_t i)       { return sample(sampler, (int32_t) i, i < req.q.size() ? &req.q[i] : nullptr); },
            [&](llama_token id) { return llama_vocab_is_eog(vocab, id); },
            text);
    stats.t_sample_ms += dflash_ms_since(t_us);
    if (paced) {
        drafter->pace.verified((int32_t) block.size(), dflash_ms_since(t_round));
        drafter->pace.accepted(0, n_accepted, n_drafted);
    }

    // Tokens of the text before its last one are in the target's memory now. If the block ended with an accepted
    // end-of-generation token, that token is the last one and does not count yet.
    const int32_t n_new = (int32_t) text.size(); // anchor + all but the last
    inject(n_new, n_past);
    n_past += n_new;

    if (n_drafted > 0) {
        stats.n_rounds++;
        stats.n_rounds_reject += !req.q.empty();
        stats.n_rounds_greedy += !req.q.empty() && req.q[0].greedy;
        stats.n_drafted  += n_drafted;
        stats.n_accepted += n_accepted;
        for (int32_t i = 0; i < n_drafted && i < DFLASH_MAX_DRAFT; ++i) {
            stats.n_drafted_per_pos [i]++;
            stats.n_accepted_per_pos[i] += i < n_accepted;
        }
    } else {
        stats.n_plain++;
    }
    stats.n_emitted += n_new;
}

// ---------------------------------------------------------------------------------------------------------------------
// C boundary: every exception becomes a status and a message

template <typename F>
static int dflash_guard(F && f) {
    try {
        f();
        dflash_set_last_error("");
        return DFLASH_OK;
    } catch (const dflash_error & err) {
        dflash_set_last_error(err.what());
        return err.status;
    } catch (const std::bad_alloc &) {
        dflash_set_last_error("out of memory");
        return DFLASH_E_MEMORY;
    } catch (const std::exception & err) {
        dflash_set_last_error(err.what());
        return DFLASH_E_INTERNAL;
    } catch (...) {
        dflash_set_last_error("unknown exception");
        return DFLASH_E_INTERNAL;
    }
}

static void dflash_need(bool ok, const char * what) {
    if (!ok) {
        throw dflash_error(DFLASH_E_ARGUMENT, what);
    }
}

static void dflash_throw_reasons(const std::vector<std::string> & reasons) {
    std::string message;
    for (const auto & reason : reasons) {
        message += message.empty() ? "" : "\n";
        message += reason;
    }
    if (!message.empty()) {
        throw dflash_error(DFLASH_E_PAIR, message);
    }
}

int dflash_api_version(void) {
    return DFLASH_API_VERSION;
}

const char * dflash_build_info(void) {
#if defined(__VERSION__)
    static const char compiler[] = __VERSION__;
#else
    static const char compiler[] = "unknown";
#endif
    static char info[512] = {};
    static const bool once = [] {
        snprintf(info, sizeof(info),
                "{\"version\": \"%s\", \"api\": %d, \"base_commit\": \"%s\", \"patch_key\": \"%s\", \"compiler\": \"%s\", \"ops\": []}",
                DFLASH_VERSION, DFLASH_API_VERSION, DFLASH_BASE_COMMIT, DFLASH_PATCH_KEY, compiler);
        return true;
    }();
    (void) once;
    return info;
}

int dflash_check_pair(const char * target_path, const char * draft_path) {
    return dflash_guard([&] {
        dflash_need(target_path && draft_path, "dflash_check_pair needs two paths");
        const auto target = dflash_target_facts_from_file(target_path);
        const auto draft  = dflash_draft_facts_from_file (draft_path);
        dflash_throw_reasons(dflash_pair_reasons(target, draft));
    });
}

int dflash_check_model(const llama_model * target, const char * draft_path) {
    return dflash_guard([&] {
        dflash_need(target && draft_path, "dflash_check_model needs a model and a path");
        const auto facts = dflash_target_facts_from_model(target);
        const auto draft = dflash_draft_facts_from_file(draft_path);
        dflash_throw_reasons(dflash_pair_reasons(facts, draft));
    });
}

dflash_params dflash_params_default(void) {
    dflash_params res = {};
    res.size         = sizeof(res);
    res.n_gpu_layers = -1;
    res.use_mmap     = true;
    res.type_k       = -1;
    res.type_v       = -1;
    res.flash_attn   = LLAMA_FLASH_ATTN_TYPE_AUTO;
    res.adaptive     = true;
    return res;
}

int dflash_session_open(llama_context * target, const char * draft_path, const dflash_params * params, dflash_session ** out) {
    return dflash_guard([&] {
        dflash_need(out != nullptr, "dflash_session_open needs a place for the session");
        *out = nullptr;
        dflash_need(target && draft_path, "dflash_session_open needs a target context and a draft path");

        const dflash_params p = params ? *params : dflash_params_default();
        dflash_need(p.size == sizeof(dflash_params), "dflash_params.size does not match this library: fill the struct with dflash_params_default()");
        dflash_need(p.n_threads >= 0 && p.n_threads_batch >= 0, "numbers of threads must not be negative");
        dflash_need(p.verify >= DFLASH_VERIFY_AUTO && p.verify <= DFLASH_VERIFY_MATCH, "verify must be 0 (auto), 1 (reject) or 2 (match)");
        dflash_need(p.flash_attn >= LLAMA_FLASH_ATTN_TYPE_AUTO && p.flash_attn <= LLAMA_FLASH_ATTN_TYPE_ENABLED, "flash_attn must be -1 (auto), 0 (off) or 1 (on)");
        for (const int32_t type : { p.type_k, p.type_v }) {
            if (type >= GGML_TYPE_COUNT || (type >= 0 && ggml_blck_size((ggml_type) type) == 0)) {
                throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("%d is not a tensor type for the draft's cache", type));
            }
        }
        dflash_need(p.p_min >= 0.0f && p.p_min <= 1.0f, "p_min must lie between 0 and 1");

        const llama_model * model = llama_get_model(target);

        // the target by itself
        if (llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
            throw dflash_error(DFLASH_E_TARGET, "the target is not a text decoder: models with an encoder cannot be speculated on");
        }
        if (llama_pooling_type(target) != LLAMA_POOLING_TYPE_NONE) {
            throw dflash_error(DFLASH_E_TARGET, "the target context pools embeddings: open it for text generation instead");
        }
        if (!llama_get_memory(target)) {
            throw dflash_error(DFLASH_E_TARGET, "the target context has no memory for a sequence");
        }
        if (llama_n_batch(target) < 2 || llama_n_ubatch(target) < 2) {
            throw dflash_error(DFLASH_E_TARGET, dflash_format("the target decodes %u tokens at once (n_batch), speculation needs at least 2", std::min(llama_n_batch(target), llama_n_ubatch(target))));
        }

        // llama.cpp keeps the last n_rs_seq + 1 tokens of a decode in one micro-batch and asserts that they fit
        if (llama_n_rs_seq(target) > 0 && llama_n_ubatch(target) < llama_n_rs_seq(target) + 2) {
            throw dflash_error(DFLASH_E_TARGET, dflash_format("the target keeps %u snapshots, its micro-batch of %u tokens (n_ubatch) must be at least %u",
                    llama_n_rs_seq(target), llama_n_ubatch(target), llama_n_rs_seq(target) + 2));
        }

        // the pair, before anything is allocated for it
        const auto facts = dflash_draft_facts_from_file(draft_path);
        dflash_throw_reasons(dflash_pair_reasons(dflash_target_facts_from_model(model), facts));

        const int32_t n_draft_max = (int32_t) facts.block_size - 1;
        if (p.n_draft < 0 || p.n_draft > n_draft_max) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("n_draft is %d, this draft proposes 1 to %d tokens (0 = all)", p.n_draft, n_draft_max));
        }

        std::unique_ptr<dflash_session> s(new dflash_session);
        s->ctx     = target;
        s->vocab   = llama_model_get_vocab(model);
        s->n_vocab = llama_vocab_n_tokens(s->vocab);
        s->p_min   = p.p_min;
        s->verify  = p.verify;
        s->tracing = p.trace;
        s->stats.size = sizeof(dflash_stats);

        llama_model_params mparams = llama_model_default_params();
        mparams.n_gpu_layers = p.n_gpu_layers < 0 ? 999 : p.n_gpu_layers;
        mparams.load_mode    = p.use_mmap ? mparams.load_mode : LLAMA_LOAD_MODE_NONE;
        s->model_dft.reset(llama_model_load_from_file(draft_path, mparams));
        if (!s->model_dft) {
            throw dflash_error(DFLASH_E_FILE, dflash_format("llama.cpp could not load the draft `%s`: its log has the reason", draft_path));
        }

        llama_context_params cparams = llama_context_default_params();
        cparams.n_ctx           = llama_n_ctx_seq(target);
        cparams.n_batch         = dflash_micro_batch((int32_t) facts.block_size, 1);
        cparams.n_ubatch        = cparams.n_batch;
        cparams.n_seq_max       = 1;
        cparams.n_threads       = p.n_threads       > 0 ? p.n_threads       : llama_n_threads(target);
        cparams.n_threads_batch = p.n_threads_batch > 0 ? p.n_threads_batch : llama_n_threads_batch(target);
        cparams.ctx_other       = target;
        cparams.swa_full        = false;
        cparams.flash_attn_type = (llama_flash_attn_type) p.flash_attn;
        cparams.type_k          = p.type_k < 0 ? cparams.type_k : (ggml_type) p.type_k;
        cparams.type_v          = p.type_v < 0 ? cparams.type_v : (ggml_type) p.type_v;
        if (p.trace) {
            cparams.cb_eval           = dflash_tap::callback;
            cparams.cb_eval_user_data = &s->tap;
        }
        s->ctx_dft.reset(llama_init_from_model(s->model_dft.get(), cparams));
        if (!s->ctx_dft) {
            throw dflash_error(DFLASH_E_MEMORY, dflash_format("llama.cpp could not create a context for the draft `%s`: its log has the reason", draft_path));
        }

        s->drafter.reset(new dflash_drafter(target, s->ctx_dft.get(), 1));
        s->drafter->set_window(facts.n_window);
        s->drafter->adaptive = p.adaptive;
        if (p.trace) {
            s->drafter->set_trace(&s->trace, &s->tap);
        }

        const bool recurrent = llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
        s->n_draft = p.n_draft > 0 ? p.n_draft : n_draft_max;
        s->rewind  = !recurrent ? DFLASH_REWIND_CUT : llama_n_rs_seq(target) > 0 ? DFLASH_REWIND_SNAPSHOT : DFLASH_REWIND_CHECKPOINT;
        if (s->rewind == DFLASH_REWIND_SNAPSHOT) {
            s->n_draft = std::min<int32_t>(s->n_draft, (int32_t) llama_n_rs_seq(target));
        }

        s->batch_cap = (int32_t) llama_n_batch(target);
        s->batch     = llama_batch_init(s->batch_cap, 0, 1);
        s->n_past    = s->pos_end();

        *out = s.release();
    });
}

void dflash_session_close(dflash_session * session) {
    (void) dflash_guard([&] { delete session; });
}

int32_t dflash_session_n_draft   (const dflash_session * session) { return session ? session->n_draft : 0; }
int32_t dflash_session_block_size(const dflash_session * session) { return session ? session->drafter->block_size() : 0; }
int32_t dflash_session_n_past    (const dflash_session * session) { return session ? session->n_past : 0; }

int dflash_session_rollback(dflash_session * session, int32_t n_keep) {
    return dflash_guard([&] {
        dflash_need(session != nullptr, "no session");
        if (n_keep < 0 || n_keep > session->n_past) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("cannot keep %d tokens of %d", n_keep, session->n_past));
        }
        session->cut(n_keep);
        session->n_past     = n_keep;
        session->rng_seeded = false;
        session->drafter->rollback(0, n_keep);
    });
}

int dflash_session_set_adaptive(dflash_session * session, bool adaptive) {
    return dflash_guard([&] {
        dflash_need(session != nullptr, "no session");
        session->drafter->adaptive = adaptive;
    });
}

static void dflash_need_tokens(const dflash_session * session, const llama_token * tokens, int32_t n_tokens) {
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= session->n_vocab) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("token %d of %d is %d, not an id of the vocabulary (0 to %d)", i, n_tokens, tokens[i], session->n_vocab - 1));
        }
    }
}

int dflash_session_prompt(dflash_session * session, const llama_token * tokens, int32_t n_tokens) {
    return dflash_guard([&] {
        dflash_need(session && (tokens || n_tokens == 0) && n_tokens >= 0, "dflash_session_prompt needs a session and tokens");
        dflash_need_tokens(session, tokens, n_tokens);
        if (n_tokens > (int32_t) llama_n_ctx_seq(session->ctx) - session->n_past) {
            throw dflash_error(DFLASH_E_MEMORY, dflash_format("%d tokens after %d exceed the target's context of %u",
                    n_tokens, session->n_past, llama_n_ctx_seq(session->ctx)));
        }
        session->prompt(tokens, n_tokens);
    });
}

int dflash_session_decoded(dflash_session * session, int32_t n_tokens) {
    return dflash_guard([&] {
        dflash_need(session != nullptr, "no session");
        const llama_pos end = session->pos_end();
        if (n_tokens < 1 || n_tokens > end || n_tokens > (int32_t) llama_n_batch(session->ctx)) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("%d tokens cannot be the target's latest decode: its sequence has %d, one decode takes %u",
                    n_tokens, end, llama_n_batch(session->ctx)));
        }
        session->ckpt_pos   = -1;
        session->rng_seeded = false;
        session->n_latest = n_tokens;
        session->stats.n_prompt += n_tokens;
        if (n_tokens > 1) {
            session->drafter->pace.restart(0);
        }
        session->inject(n_tokens, end - n_tokens);
        session->n_past = end;
    });
}

int dflash_session_step(dflash_session * session, llama_sampler * sampler, llama_token id_last, int32_t n_draft_max,
        llama_token * out, int32_t capacity, int32_t * n_out) {
    return dflash_guard([&] {
        dflash_need(n_out != nullptr, "dflash_session_step needs a place for the number of tokens");
        *n_out = 0;
        dflash_need(session && sampler && out && capacity >= 1, "dflash_session_step needs a session, a sampler and room for at least one token");
        dflash_need_tokens(session, &id_last, 1);

        session->step(sampler, id_last, n_draft_max, capacity);

        std::copy(session->text.begin(), session->text.end(), out);
        *n_out = (int32_t) session->text.size();
    });
}

int dflash_session_stats(const dflash_session * session, dflash_stats * stats) {
    return dflash_guard([&] {
        dflash_need(session && stats, "dflash_session_stats needs a session and a struct");
        dflash_need(stats->size == sizeof(dflash_stats), "dflash_stats.size does not match this library");
        *stats = session->stats;
        const auto & drafter = *session->drafter;
        stats->n_injected    = drafter.n_injected() - session->n_injected_old;
        stats->t_inject_ms   = drafter.ms_inject()  - session->ms_inject_old;
        stats->pace_plain_ms = drafter.pace.plain_ms();
        stats->pace_draft_ms = drafter.pace.draft_ms();
        stats->pace_gain_ms  = drafter.pace.gain(0);
        stats->n_visited   = session->overlap.n_total       - session->overlap_stats.n_total;
        stats->sum_overlap = session->overlap.total_sampled - session->overlap_stats.total_sampled;
        stats->sum_top     = session->overlap.total_greedy  - session->overlap_stats.total_greedy;
        stats->sum_reach   = session->overlap.total_reach   - session->overlap_stats.total_reach;
    });
}

int dflash_session_stats_reset(dflash_session * session) {
    return dflash_guard([&] {
        dflash_need(session != nullptr, "no session");
        session->stats      = {};
        session->stats.size = sizeof(dflash_stats);
        session->n_injected_old = session->drafter->n_injected();
        session->ms_inject_old  = session->drafter->ms_inject();
        session->overlap_stats = session->overlap;
    });
}

int dflash_session_trace(const dflash_session * session, dflash_trace * trace) {
    return dflash_guard([&] {
        dflash_need(session && trace, "dflash_session_trace needs a session and a struct");
        dflash_need(trace->size == sizeof(dflash_trace), "dflash_trace.size does not match this library");
        dflash_need(session->tracing, "the session was opened without trace");

        const auto & t = session->trace;

        auto ptr = [](const auto & v) { return v.empty() ? nullptr : v.data(); };

        trace->n_pos      = t.n_pos;
        trace->n_draft    = (int32_t) t.draft.size();
        trace->n_accepted = session->n_accepted;
        trace->n_top_k    = t.n_top_k;
        trace->n_embd     = t.n_embd;
        trace->n_vocab    = t.n_vocab;
        trace->pos        = t.pos;
        trace->anchor     = t.anchor;
        trace->draft      = ptr(t.draft);
        trace->candidates = ptr(t.candidates);
        trace->scores     = ptr(t.scores);
        trace->lattice    = ptr(t.lattice);
        trace->hidden     = ptr(t.hidden);
        trace->logits     = ptr(t.logits);
    });
}
