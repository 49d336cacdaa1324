#include "dflash-draft.h"

#include "dflash-error.h"

#include "ggml-backend.h"
#include "ggml.h"

#include "../../src/llama-ext.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>

bool dflash_tap::callback(ggml_tensor * t, bool ask, void * user_data) {
    auto * tap = (dflash_tap *) user_data;

    std::vector<float> * dst = nullptr;
    if (strcmp(t->name, "result_norm") == 0) {
        dst = &tap->hidden;
    } else if (strcmp(t->name, "result_output") == 0) {
        dst = &tap->logits;
    }
    if (ask) {
        return dst != nullptr;
    }
    if (dst && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t)) {
        dst->resize(ggml_nelements(t));
        ggml_backend_tensor_get(t, dst->data(), 0, ggml_nbytes(t));
    }
    return true;
}

static std::string dflash_meta(const llama_model * model, const char * key) {
    char buf[64] = {};
    return llama_model_meta_val_str(model, key, buf, sizeof(buf)) >= 0 ? buf : "";
}

dflash_drafter::dflash_drafter(llama_context * ctx_tgt, llama_context * ctx_dft, uint32_t n_seq)
    : ctx_tgt(ctx_tgt), ctx_dft(ctx_dft), n_seq(n_seq) {
    if (!ctx_tgt || !ctx_dft) {
        throw dflash_error(DFLASH_E_ARGUMENT, "draft-dflash needs a target context and a draft context");
    }

    const llama_model * model_tgt = llama_get_model(ctx_tgt);
    const llama_model * model_dft = llama_get_model(ctx_dft);
    const llama_vocab * vocab     = llama_model_get_vocab(model_dft);

    const uint32_t  n_ids = llama_model_target_layer_ids_n(model_dft);
    const int32_t * ids   = llama_model_target_layer_ids  (model_dft);
    if (n_ids == 0 || !ids) {
        throw dflash_error(DFLASH_E_PAIR, "the draft model does not say which target layers it reads: it is not a DFlash draft");
    }
    target_layers.assign(ids, ids + n_ids);

    n_embd     = llama_model_n_embd(model_dft);
    n_vocab    = llama_vocab_n_tokens(vocab);
    n_top_k    = std::max(0, llama_model_dflash_selector_top_k(model_dft));
    mask_token = llama_vocab_mask(vocab);
    n_pos_embd = llama_model_rope_type(model_dft) == LLAMA_ROPE_TYPE_MROPE ? 4 : 1;

    const std::string block = dflash_meta(model_dft, "dflash.block_size");
    n_block = block.empty() ? 16 : std::atoi(block.c_str());
    causal  = dflash_meta(model_dft, "dflash.attention.causal") == "true";

    // the pair check says all this with more words; here it guards callers that skipped it
    if (n_embd != llama_model_n_embd(model_tgt)) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("hidden size: the draft has %d, the target %d", n_embd, llama_model_n_embd(model_tgt)));
    }
    if (n_vocab != llama_vocab_n_tokens(llama_model_get_vocab(model_tgt))) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("vocabulary: the draft has %d tokens, the target %d", n_vocab, llama_vocab_n_tokens(llama_model_get_vocab(model_tgt))));
    }
    if (n_block < 2 || n_block > DFLASH_MAX_DRAFT + 1) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("the draft has block size %d, expected 2 to %d", n_block, DFLASH_MAX_DRAFT + 1));
    }
    if (mask_token < 0 || mask_token >= n_vocab) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("the draft has mask token %d, expected an id below %d", mask_token, n_vocab));
    }
    for (const int32_t id : target_layers) {
        if (id < 0 || id > llama_model_n_layer(model_tgt)) {
            throw dflash_error(DFLASH_E_PAIR, dflash_format("depth: the draft reads the input of target layer %d, the target has %d layers", id, llama_model_n_layer(model_tgt)));
        }
    }
    const uint32_t n_min = std::min(llama_n_ubatch(ctx_dft), llama_n_batch(ctx_dft));
    if (n_min < (uint32_t) n_block) {
        throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("the draft context takes %u tokens at once, a block has %d: raise the batch sizes (-b, -ub)", n_min, n_block));
    }
    if (llama_n_seq_max(ctx_dft) < n_seq) {
        throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("the draft context holds %u sequences, %u are wanted", llama_n_seq_max(ctx_dft), n_seq));
    }

    batch.reset(llama_batch_ext_init(ctx_dft));

    causal_old = llama_get_causal_attn(ctx_dft);

    for (const int32_t id : target_layers) {
        llama_set_embeddings_layer_inp(ctx_tgt, (uint32_t) id, true);
    }
    // the selector's lattice travels in the nextn rows of all tokens; without a selector the logits are read
    llama_set_embeddings_nextn(ctx_dft, n_top_k > 0, /*masked =*/ n_top_k == 0);
    llama_set_causal_attn(ctx_dft, causal);
}

dflash_drafter::~dflash_drafter() {
    for (const int32_t id : target_layers) {
        llama_set_embeddings_layer_inp(ctx_tgt, (uint32_t) id, false);
    }
    llama_set_embeddings_nextn(ctx_dft, false, false);
    llama_set_causal_attn(ctx_dft, causal_old);
}

llama_pos dflash_drafter::pos_next(llama_seq_id seq_id) const {
    return llama_memory_seq_pos_max(llama_get_memory(ctx_dft), seq_id) + 1;
}

void dflash_drafter::rollback(llama_seq_id seq_id, llama_pos pos) {
    llama_memory_t mem = llama_get_memory(ctx_dft);
    if (!llama_memory_seq_rm(mem, seq_id, pos, -1)) {
        llama_memory_seq_rm(mem, seq_id, -1, -1);
    }
}

void dflash_drafter::set_trace(dflash_trace_data * trace, dflash_tap * tap) {
    this->trace = trace;
    this->tap   = tap;
}

void dflash_drafter::inject(const dflash_feature_row * rows, size_t n_rows) {
    if (n_rows == 0) {
        return;
    }

    const size_t n_layers = target_layers.size();
    const size_t n_row    = n_layers * (size_t) n_embd;
    const size_t n_chunk  = std::min(llama_n_ubatch(ctx_dft), llama_n_batch(ctx_dft));

    std::vector<const float *> layers(n_layers);
    for (size_t k = 0; k < n_layers; ++k) {
        layers[k] = llama_get_embeddings_layer_inp(ctx_tgt, (uint32_t) target_layers[k]);
        if (!layers[k]) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("the target has no features of layer %d: it has decoded nothing since the session was opened", target_layers[k]));
        }
    }

    // make each sequence end right before its first row
    std::vector<bool> seen(n_seq, false);
    for (size_t i = 0; i < n_rows; ++i) {
        const llama_seq_id seq_id = rows[i].seq_id;
        if (seq_id < 0 || (uint32_t) seq_id >= n_seq) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("sequence %d is not one of the draft's %u", seq_id, n_seq));
        }
        if (seen[seq_id]) {
            continue;
        }
        seen[seq_id] = true;

        const llama_pos next = pos_next(seq_id);
        if (next > rows[i].pos) {
            rollback(seq_id, rows[i].pos);
        }
        // M-RoPE positions may jump over an image, plain ones may not
        if (n_pos_embd == 1 && pos_next(seq_id) != rows[i].pos) {
            rollback(seq_id, 0);
        }
    }

    for (size_t beg = 0; beg < n_rows; beg += n_chunk) {
        const size_t n = std::min(n_chunk, n_rows - beg);

        features.resize(n * n_row);
        llama_batch_ext_clear(batch.get());

        for (size_t i = 0; i < n; ++i) {
            const auto & row = rows[beg + i];

            float * dst = features.data() + i * n_row;
            for (size_t k = 0; k < n_layers; ++k) {
                memcpy(dst + k * n_embd, layers[k] + (size_t) row.i_batch * n_embd, n_embd * sizeof(float));
            }

            const llama_pos pos[4] = { row.pos, row.pos, row.pos, 0 };
            const int32_t   idx    = llama_batch_ext_add_embd(batch.get(), row.seq_id, { dst, 1, n_row });
            if (idx < 0 || !llama_batch_ext_set_pos(batch.get(), idx, pos)) {
                throw dflash_error(DFLASH_E_INTERNAL, dflash_format("feature row %zu of %zu does not fit the draft's batch (code %d)", beg + i, n_rows, idx));
            }
        }

        const int32_t rc = llama_process(ctx_dft, LLAMA_PROCESS_TYPE_DECODE, batch.get());
        if (rc != 0) {
            throw dflash_error(rc == 1 ? DFLASH_E_MEMORY : DFLASH_E_DECODE,
                    dflash_format("the draft could not take %zu feature rows at position %d (code %d)", n, rows[beg].pos, rc));
        }
    }
}

void dflash_drafter::draft(std::vector<dflash_request> & requests, float p_min) {
    // as many whole blocks at a time as a micro-batch holds
    const size_t n_fit = std::max<size_t>(1, std::min(llama_n_ubatch(ctx_dft), llama_n_batch(ctx_dft)) / n_block);

    std::vector<dflash_request *> group;
    for (auto & req : requests) {
        req.tokens.clear();
        req.q.clear();
        req.invalid = false;
        if (req.n_max <= 0) {
            continue;
        }
        if (req.anchor < 0 || req.anchor >= n_vocab) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("anchor %d is not a token id (0 to %d)", req.anchor, n_vocab - 1));
        }
        group.push_back(&req);
        if (group.size() == n_fit) {
            draft_group(group.data(), group.size(), p_min);
            group.clear();
        }
    }
    if (!group.empty()) {
        draft_group(group.data(), group.size(), p_min);
    }
}

void dflash_drafter::draft_group(dflash_request ** requests, size_t n_requests, float p_min) {
    // Without causality every mask token is visible to all others, so the block must be as long as in training; with it the
    // rows after the last wanted token change nothing. All blocks of a batch must have the same length.
    int32_t n_rows = n_block;
    if (causal) {
        n_rows = 2;
        for (size_t r = 0; r < n_requests; ++r) {
            n_rows = std::max(n_rows, std::min(n_block, requests[r]->n_max + 1));
        }
    }
    // near the end of the context the block must fit
    const int32_t n_ctx = (int32_t) llama_n_ctx_seq(ctx_dft);
    for (size_t r = 0; r < n_requests; ++r) {
        n_rows = std::min(n_rows, n_ctx - requests[r]->pos);
    }
    if (n_rows < 2) {
        return;
    }

    llama_batch_ext_clear(batch.get());
    for (size_t r = 0; r < n_requests; ++r) {
        const auto & req = *requests[r];

        // features missing in between are bridged: the draft only loses context
        if (pos_next(req.seq_id) > req.pos) {
            rollback(req.seq_id, req.pos);
        }
        if (n_pos_embd == 1 && pos_next(req.seq_id) != req.pos) {
            rollback(req.seq_id, 0);
        }
        for (int32_t i = 0; i < n_rows; ++i) {
            const llama_pos pos[4] = { req.pos + i, req.pos + i, req.pos + i, 0 };
            const int32_t   idx    = llama_batch_ext_add_token(batch.get(), req.seq_id, i == 0 ? req.anchor : mask_token);
            if (idx < 0 || !llama_batch_ext_set_pos(batch.get(), idx, pos)) {
                throw dflash_error(DFLASH_E_INTERNAL, dflash_format("a block of %d tokens does not fit the draft's batch (code %d)", n_rows, idx));
            }
            if (n_top_k == 0 && i > 0) {
                llama_batch_ext_set_output_logits(batch.get(), idx, true);
            }
        }
    }

    const int32_t rc = llama_process(ctx_dft, LLAMA_PROCESS_TYPE_DECODE, batch.get());
    if (rc == 0) {
        const float * lattice = n_top_k > 0 ? llama_get_embeddings_nextn(ctx_dft) : nullptr;
        if (n_top_k > 0 && !lattice) {
            throw dflash_error(DFLASH_E_INTERNAL, "the draft returned no candidate scores");
        }
        for (size_t r = 0; r < n_requests; ++r) {
            auto & req = *requests[r];
            if (n_top_k > 0) {
                walk(req, lattice + r * n_rows * (size_t) n_embd, n_rows, p_min);
            } else {
                argmax(req, (int32_t) r * n_rows, n_rows, p_min);
            }
            if (trace && r == 0) {
                fill_trace(req, lattice, n_rows);
            }
        }
    }

    // the block's own keys and values are noise: only features stay
    for (size_t r = 0; r < n_requests; ++r) {
        rollback(requests[r]->seq_id, requests[r]->pos);
    }

    // no free cell (code 1) means no draft this time, not a failure of the text
    if (rc < 0 || rc > 1) {
        throw dflash_error(DFLASH_E_DECODE, dflash_format("the draft pass failed (code %d)", rc));
    }
}

// Lattice row t (1 <= t < n_rows): k candidate ids, then k x k scores, one row per predecessor candidate of t - 1.
// Greedy: the best candidate of each row given the one chosen before; equal scores go to the lower id. With a chain: a draw
// from the candidates as the request shapes them. Where the walk stops must not depend on a token that is dropped, or the
// accepted text would be biased: p_min looks at the likeliest candidate, not at the drawn one.
void dflash_drafter::walk(dflash_request & req, const float * lattice, int32_t n_rows, float p_min) const {
    int32_t pred = 0;
    for (int32_t t = 1; t < n_rows && (int32_t) req.tokens.size() < req.n_max; ++t) {
        const float * ids    = lattice + (size_t) t * n_embd;
        const float * scores = ids + n_top_k + (size_t) pred * n_top_k;

        int32_t best = -1;
        for (int32_t c = 0; c < n_top_k; ++c) {
            if (std::isnan(scores[c])) {
                continue;
            }
            if (best < 0 || scores[c] > scores[best] || (scores[c] == scores[best] && ids[c] < ids[best])) {
                best = c;
            }
        }
        if (best < 0 || !(ids[best] >= 0.0f && ids[best] < (float) n_vocab) || scores[best] == -INFINITY) {
            req.invalid = true;
            return;
        }
        if (p_min > 0.0f) {
            float sum = 0.0f;
            for (int32_t c = 0; c < n_top_k; ++c) {
                sum += std::isnan(scores[c]) ? 0.0f : std::exp(scores[c] - scores[best]);
            }
            if (1.0f < p_min * sum) {
                return;
            }
        }
        if (req.chain) {
            std::vector<llama_token> row_ids(n_top_k);
            for (int32_t c = 0; c < n_top_k; ++c) {
                const bool valid = ids[c] >= 0.0f && ids[c] < (float) n_vocab;
                if (!valid) {
                    req.invalid = true;
                    return;
                }
                row_ids[c] = (llama_token) ids[c];
            }
            dflash_q_row row;
            best = dflash_draw(req.chain, row_ids.data(), scores, n_top_k, req.greedy, *req.rng, row);
            if (best < 0) {
                return; // the chain left no candidate: nothing the target could accept either
            }
            req.q.push_back(std::move(row));
        }
        req.tokens.push_back((llama_token) ids[best]);
        pred = best;
    }
}

// without a selector the positions are independent: the best token of each row
void dflash_drafter::argmax(dflash_request & req, int32_t i_first, int32_t n_rows, float p_min) const {
    for (int32_t t = 1; t < n_rows && (int32_t) req.tokens.size() < req.n_max; ++t) {
        const float * logits = llama_get_logits_ith(ctx_dft, i_first + t);
        if (!logits) {
            throw dflash_error(DFLASH_E_INTERNAL, "the draft returned no logits");
        }
        int32_t best = -1;
        for (int32_t i = 0; i < n_vocab; ++i) {
            if (!std::isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) {
                best = i;
            }
        }
        if (best < 0 || logits[best] == -INFINITY) {
            req.invalid = true;
            return;
        }
        if (p_min > 0.0f) {
            double sum = 0.0;
            for (int32_t i = 0; i < n_vocab; ++i) {
                sum += std::isnan(logits[i]) ? 0.0 : std::exp((double) logits[i] - logits[best]);
            }
            if (1.0 < p_min * sum) {
                return;
            }
        }
        if (req.chain) {
            dflash_q_row row;
            row.ids    = { best };
            row.q      = { 1.0 };
            row.drawn  = best;
            row.greedy = true;
            req.q.push_back(std::move(row));
        }
        req.tokens.push_back(best);
    }
}

void dflash_drafter::fill_trace(const dflash_request & req, const float * lattice, int32_t n_rows) {
    const int32_t k     = n_top_k;
    const int32_t n_pos = n_rows - 1;

    trace->n_pos   = n_pos;
    trace->n_top_k = k;
    trace->n_embd  = n_embd;
    trace->n_vocab = n_vocab;
    trace->pos     = req.pos;
    trace->anchor  = req.anchor;
    trace->draft   = req.tokens;

    // first block of the batch; row 0 is the anchor's
    auto rows_of = [&](const std::vector<float> & src, int32_t width) {
        std::vector<float> res;
        if (src.size() >= (size_t) n_rows * width) {
            res.assign(src.begin() + width, src.begin() + (size_t) n_rows * width);
        }
        return res;
    };
    trace->hidden = rows_of(tap->hidden, n_embd);
    trace->logits = rows_of(tap->logits, n_vocab);

    trace->candidates.assign((size_t) n_pos * k, 0);
    trace->scores    .assign((size_t) n_pos * k, 0.0f);
    trace->lattice   .assign((size_t) n_pos * k * k, 0.0f);
    if (k == 0 || trace->logits.empty()) {
        return;
    }

    for (int32_t t = 1; t < n_rows; ++t) {
        for (int32_t c = 0; c < k; ++c) {
            const float id = lattice[(size_t) t * n_embd + c];
            if (!(id >= 0.0f && id < (float) n_vocab)) {
                return; // an invalid round has nothing to show
            }
        }
    }

    std::vector<int32_t> order(k); // of this row: position in the list shown -> position in the lattice
    std::vector<int32_t> order_pred(k);
    std::iota(order_pred.begin(), order_pred.end(), 0);

    int32_t pred = 0; // in the list shown
    for (int32_t t = 0; t < n_pos; ++t) {
        const float * ids    = lattice + (size_t) (t + 1) * n_embd;
        const float * logits = trace->logits.data() + (size_t) t * n_vocab;

        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
            const float la = logits[(int32_t) ids[a]];
            const float lb = logits[(int32_t) ids[b]];
            return la != lb ? la > lb : ids[a] < ids[b];
        });
        for (int32_t c = 0; c < k; ++c) {
            trace->candidates[(size_t) t * k + c] = (llama_token) ids[order[c]];
            for (int32_t p = 0; p < k; ++p) {
                trace->lattice[((size_t) t * k + p) * k + c] = ids[k + (size_t) order_pred[p] * k + order[c]];
            }
        }
        const float * row = trace->lattice.data() + ((size_t) t * k + pred) * k;
        std::copy(row, row + k, trace->scores.begin() + (size_t) t * k);

        int32_t best = 0;
        for (int32_t c = 1; c < k; ++c) {
            const llama_token * ids_row = trace->candidates.data() + (size_t) t * k;
            if (row[c] > row[best] || (row[c] == row[best] && ids_row[c] < ids_row[best])) {
                best = c;
            }
        }
        pred       = best;
        order_pred = order;
    }
}
