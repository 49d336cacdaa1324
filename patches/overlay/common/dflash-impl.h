// draft-dflash for llama-server and llama-cli: the shared drafter behind llama.cpp's interface for speculators.
// Included by speculative.cpp after its own implementations, whose base class it extends.

#pragma once

#include "dflash-check.h"
#include "dflash-draft.h"
#include "dflash-error.h"
#include "dflash-fit.h"
#include "dflash-slot.h"

// drafts of the first generation have no selector: their logits are sampled on the device, which the base does well
inline bool dflash_speculative_applies(const common_params_speculative & params) {
    return params.draft.ctx_dft && llama_model_dflash_selector_top_k(llama_get_model(params.draft.ctx_dft)) > 0;
}

struct dflash_speculative_impl : public common_speculative_impl {
    common_params_speculative_draft params;

    std::unique_ptr<dflash_drafter> drafter;

    std::vector<dflash_feature_row> rows;
    std::vector<dflash_request>     requests;

    int64_t n_inject_failed = 0;
    int64_t n_invalid       = 0;
    int64_t t_round         = 0; // when the latest draft was ready, microseconds; 0: nothing to time

    // a verification whose tokens are being sampled and accepted
    int32_t n_rows_pass     = 0; // 0: none
    int64_t t_pass_begin    = 0; // microseconds
    int64_t t_pass_end      = 0;

    dflash_speculative_impl(const common_params_speculative & params_spec, uint32_t n_seq)
        : common_speculative_impl(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH, n_seq, params_spec.draft.n_max)
        , params(params_spec.draft)
        , drafter(new dflash_drafter(params.ctx_tgt, params.ctx_dft, n_seq)) {
        const int32_t n_draft_max = drafter->n_draft_max();
        if (params.n_max > n_draft_max || params.n_min > n_draft_max) {
            LOG_WRN("draft-dflash: this draft proposes at most %d tokens (block size %d): n_max %d -> %d, n_min %d -> %d\n",
                    n_draft_max, drafter->block_size(), params.n_max, std::min(params.n_max, n_draft_max),
                    params.n_min, std::min(params.n_min, n_draft_max));
            params.n_max = std::min(params.n_max, n_draft_max);
            params.n_min = std::min(params.n_min, n_draft_max);
        }
        n_max = params.n_max;

        drafter->adaptive = params.dflash_adaptive;
        int64_t n_window  = 0;
        try {
            n_window = dflash_draft_facts_from_file(params.mparams.path).n_window;
        } catch (const std::exception &) {
            // a model that did not come from this file: take all features
        }
        drafter->set_window(n_window);

        LOG_INF("draft-dflash: block %d, n_max %d (%s), n_min %d, p_min %.2f, candidates %d, window %d, %s inside the block, %u sequences\n",
                drafter->block_size(), params.n_max, params.dflash_adaptive ? "adaptive" : "fixed", params.n_min, params.p_min,
                drafter->top_k(), (int) n_window, drafter->is_causal() ? "causal" : "not causal", n_seq);
    }

    void begin(llama_seq_id seq_id, const llama_tokens & prompt) override {
        if (seq_id < 0 || seq_id >= (llama_seq_id) n_seq || prompt.empty()) {
            return;
        }
        tell_pass(false);
        drafter->pace.restart(seq_id);
        if (drafter->pos_next(seq_id) == 0) {
            LOG_DBG("draft-dflash: sequence %d starts without features of its prompt of %zu tokens\n", seq_id, prompt.size());
        }
    }

    // A round also costs what follows the pass: every row is sampled, and what was not accepted is taken back. It ends where the next
    // round begins at once; else only the pass is counted, as nobody knows what the time after it went into.
    void tell_pass(bool next_round) {
        if (n_rows_pass > 0) {
            drafter->pace.verified(n_rows_pass, 1e-3 * (double) ((next_round ? ggml_time_us() : t_pass_end) - t_pass_begin));
        }
        n_rows_pass = 0;
    }

    void warn_lost(const char * reason) {
        if (n_inject_failed++ == 0) {
            LOG_WRN("draft-dflash: features lost, drafts will be weaker for a while: %s\n", reason);
        }
    }

    bool process(const common_batch & batch) override {
        // entries with both a token and an embedding carry no features of their own position
        if (batch.size() <= 0 || batch.has_token() == batch.has_embd()) {
            return true;
        }

        // the pass was the verification of the latest drafts if it has their rows; slots that cannot draft may have joined
        // with a row each, a piece of a prompt would be another kind of work
        tell_pass(false);
        const int32_t n_rows = drafter->pace.n_rows();
        if (t_round > 0 && batch.size() >= n_rows && batch.size() < n_rows + (int32_t) n_seq) {
            llama_synchronize(params.ctx_tgt);
            n_rows_pass  = batch.size();
            t_pass_begin = t_round;
            t_pass_end   = ggml_time_us();
        }
        t_round = 0;

        // rows of one sequence may be spread over the batch: group them
        rows.clear();
        for (llama_seq_id seq_id = 0; seq_id < (llama_seq_id) n_seq; ++seq_id) {
            const size_t beg = rows.size();
            for (int32_t i = 0; i < batch.size(); ++i) {
                if (batch.tokens[i].seq_id == seq_id) {
                    rows.push_back({ i, batch.tokens[i].pos[0], seq_id });
                }
            }
            // an M-RoPE image pins its rows to one position: a windowed memory could never free their cells, and the draft
            // may jump over them
            if (batch.has_embd() && rows.size() - beg > 1 && rows[beg].pos == rows.back().pos) {
                rows.resize(beg);
            }
        }

        try {
            drafter->inject(rows.data(), rows.size());
        } catch (const std::exception & err) {
            // without features the drafts are weaker, the text is not: drop them and go on
            warn_lost(err.what());
            for (const auto & row : rows) {
                drafter->rollback(row.seq_id, 0);
            }
        }
        return true;
    }

    void draft(common_speculative_draft_params_vec & dparams) override {
        requests.clear();
        for (llama_seq_id seq_id = 0; seq_id < (llama_seq_id) n_seq; ++seq_id) {
            const auto & dp = dparams[seq_id];
            if (!dp.drafting) {
                continue;
            }
            dflash_request req;
            req.seq_id = seq_id;
            req.pos    = dp.pos0;
            req.anchor = dp.id_last;
            req.n_max  = dp.n_max > 0 ? std::min(params.n_max, dp.n_max) : params.n_max;
            if (dp.dflash && dp.dflash->reject) {
                req.chain  = dp.dflash->chain;
                req.rng    = &dp.dflash->rng;
                req.greedy = dp.dflash->greedy_draft();
                req.fixed  = dp.dflash->fixed;
            }
            requests.push_back(std::move(req));
        }
        tell_pass(!requests.empty());
        if (requests.empty()) {
            return;
        }

        const int64_t n_lost = drafter->n_lost();
        try {
            drafter->draft(requests, params.p_min);
        } catch (const std::exception & err) {
            LOG_WRN("draft-dflash: no draft this time: %s\n", err.what());
            return;
        }
        if (drafter->n_lost() > n_lost) {
            warn_lost("the draft's memory took none");
        }
        if (drafter->adaptive && drafter->pace.gave_up()) {
            const auto & pace = drafter->pace;
            LOG_WRN("draft-dflash: drafting does not pay here and is left out, with a try now and then: a draft takes %.1f ms and "
                    "lately saved %.1f ms (%.2f tokens accepted, %.1f ms per token without). %s\n",
                    pace.draft_ms(), pace.gain(requests[0].seq_id), pace.accepted_mean(), pace.plain_ms(),
                    pace.accepted_mean() < 0.1 ? "Almost nothing is accepted: is this the draft for this target and revision?"
                                               : "The target is too fast, or the text too hard to guess, for this draft.");
        }

        for (auto & req : requests) {
            if (req.invalid && n_invalid++ == 0) {
                LOG_WRN("draft-dflash: the draft model returned no valid token (NaN or an id out of range); the text is not affected\n");
            }
            if (drafter->adaptive && req.tokens.empty() && !req.invalid && req.n_max > 0 && dparams[req.seq_id].dflash && dparams[req.seq_id].dflash->stats) {
                dparams[req.seq_id].dflash->stats->n_skipped++;
            }
            // dropping a sampled draft because it is short would bias the text: n_min is for greedy ones
            if (req.tokens.size() >= (size_t) std::max(0, params.n_min) || !req.q.empty()) {
                auto & dp = dparams[req.seq_id];
                *dp.result = std::move(req.tokens);
                if (dp.dflash) {
                    dp.dflash->q = std::move(req.q);
                }
            }
        }
        t_round = drafter->adaptive ? ggml_time_us() : 0;
    }

    void accept(llama_seq_id seq_id, uint16_t n_accepted, bool is_other) override {
        if (drafter->adaptive && !is_other) {
            drafter->pace.accepted(seq_id, n_accepted, drafter->n_draft_max());
        }
    }
};
