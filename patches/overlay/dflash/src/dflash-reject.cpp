#include "dflash-reject.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

void dflash_overlap::add(double sum_min, double p_top, double p_all) {
    // a memory of about a hundred positions
    const double decay = 0.99;

    sampled = decay * sampled + sum_min;
    top     = decay * top     + p_top;
    weight  = decay * weight  + 1.0;

    total_sampled += sum_min;
    total_greedy  += p_top;
    total_reach   += p_all;
    n_total++;
}

static bool dflash_sampler_keeps_distribution(const char * name) {
    // samplers that only look at the candidates and the history; the base marks inactive ones with '?' and those that can
    // run on a device with '+' or '-'
    static const char * const known[] = {
        "logit-bias", "penalties", "dry", "top-n-sigma", "top-k", "typical", "top-p", "min-p", "temp", "temp-ext",
    };
    if (name[0] == '?') {
        return true;
    }
    while (*name == '+' || *name == '-') {
        ++name;
    }
    return std::any_of(std::begin(known), std::end(known), [&](const char * k) { return strcmp(k, name) == 0; });
}

bool dflash_chain_has_distribution(const llama_sampler * chain) {
    // a lone sampler is no chain; llama_sampler_chain_n would abort on it
    if (!chain || strcmp(llama_sampler_name(chain), "chain") != 0) {
        return false;
    }
    const int n = llama_sampler_chain_n(chain);
    if (n < 1) {
        return false;
    }
    auto * c = const_cast<llama_sampler *>(chain);
    for (int i = 0; i < n - 1; ++i) {
        if (!dflash_sampler_keeps_distribution(llama_sampler_name(llama_sampler_chain_get(c, i)))) {
            return false;
        }
    }
    const char * last = llama_sampler_name(llama_sampler_chain_get(c, n - 1));
    while (*last == '+' || *last == '-') {
        ++last;
    }
    return strcmp(last, "dist") == 0;
}

void dflash_chain_shape(llama_sampler * chain, llama_token_data_array * cur) {
    const int n = llama_sampler_chain_n(chain);
    for (int i = 0; i < n - 1; ++i) {
        llama_sampler_apply(llama_sampler_chain_get(chain, i), cur);
    }
}

int32_t dflash_draw(llama_sampler * chain, const llama_token * ids, const float * scores, int32_t n, bool greedy,
        dflash_rng & rng, dflash_q_row & row) {
    std::vector<llama_token_data> cur(n);
    for (int32_t i = 0; i < n; ++i) {
        cur[i] = { ids[i], std::isnan(scores[i]) ? -INFINITY : scores[i], 0.0f };
    }
    llama_token_data_array arr = { cur.data(), cur.size(), -1, false };
    dflash_chain_shape(chain, &arr);

    row.ids.clear();
    row.q  .clear();
    row.drawn  = LLAMA_TOKEN_NULL;
    row.greedy = greedy;

    double max_l = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < arr.size; ++i) {
        max_l = std::max(max_l, (double) arr.data[i].logit);
    }
    if (!(max_l > -std::numeric_limits<double>::infinity()) || std::isinf(max_l)) {
        return -1;
    }

    double sum = 0.0;
    for (size_t i = 0; i < arr.size; ++i) {
        const double w = std::exp((double) arr.data[i].logit - max_l);
        if (w > 0.0) {
            row.ids.push_back(arr.data[i].id);
            row.q  .push_back(w);
            sum += w;
        }
    }
    for (auto & q : row.q) {
        q /= sum;
    }

    size_t best = 0;
    for (size_t i = 1; i < row.q.size(); ++i) {
        if (row.q[i] > row.q[best] || (row.q[i] == row.q[best] && row.ids[i] < row.ids[best])) {
            best = i;
        }
    }
    size_t pick = best;
    if (!greedy) {
        const double u = rng.uniform();
        double run = 0.0;
        for (size_t i = 0; i < row.q.size(); ++i) {
            run += row.q[i];
            pick = i;
            if (u < run) {
                break;
            }
        }
    }
    row.drawn = row.ids[pick];
    return (int32_t) (std::find(ids, ids + n, row.drawn) - ids);
}

bool dflash_couple(llama_token_data_array & p, const dflash_q_row & row, dflash_rng & rng, dflash_overlap * overlap) {
    // p of each candidate of q: one pass over p, since p may be the whole vocabulary
    const size_t n_q = row.ids.size();

    std::vector<double>                    p_of(n_q, 0.0);
    std::vector<std::pair<size_t, size_t>> at; // (index in p, index in q), ascending
    at.reserve(n_q);

    uint64_t filter = 0;
    for (size_t j = 0; j < n_q; ++j) {
        filter |= UINT64_C(1) << (row.ids[j] & 63);
    }
    double sum_p = 0.0;
    for (size_t i = 0; i < p.size; ++i) {
        sum_p += p.data[i].p;
        if (!(filter >> (p.data[i].id & 63) & 1)) {
            continue;
        }
        for (size_t j = 0; j < n_q; ++j) {
            if (p.data[i].id == row.ids[j]) {
                p_of[j] = p.data[i].p;
                at.emplace_back(i, j);
                break;
            }
        }
    }

    size_t drawn = n_q;
    size_t best  = 0;
    double sum_min = 0.0;
    double p_all   = 0.0;
    for (size_t j = 0; j < n_q; ++j) {
        drawn = row.ids[j] == row.drawn ? j : drawn;
        best  = row.q[j] > row.q[best] ? j : best;
        sum_min += std::min(p_of[j], row.q[j]);
        p_all   += p_of[j];
    }
    if (overlap && n_q > 0) {
        overlap->add(sum_min, p_of[best], p_all);
    }
    if (drawn == n_q) {
        return false; // not a draft of this row: the chain's own draw stands
    }

    auto q_of = [&](size_t j) { return row.greedy ? (j == drawn ? 1.0 : 0.0) : row.q[j]; };

    // accept with min(1, p/q), without dividing
    const double u = rng.uniform();
    if (p_of[drawn] > 0.0 && u * q_of(drawn) < p_of[drawn]) {
        for (const auto & [i, j] : at) {
            if (j == drawn) {
                p.selected = (int64_t) i;
            }
        }
        return true;
    }

    // residual: positive part of p - q; only the candidates of q differ from p
    double sum = sum_p;
    for (const auto & [i, j] : at) {
        sum -= std::min(p_of[j], q_of(j));
    }
    const double target = rng.uniform() * sum;

    double  run  = 0.0;
    int64_t pick = -1;
    size_t  next = 0;
    for (size_t i = 0; i < p.size; ++i) {
        double w = p.data[i].p;
        if (next < at.size() && at[next].first == i) {
            w = std::max(0.0, w - q_of(at[next].second));
            ++next;
        }
        if (w <= 0.0) {
            continue;
        }
        run += w;
        pick = (int64_t) i;
        if (target < run) {
            break;
        }
    }
    if (pick >= 0) {
        p.selected = pick;
    }
    // pick < 0: p <= q everywhere, that is p = q up to rounding, and the chain's own draw from p stands
    return false;
}

static dflash_coupling *& dflash_coupling_current() {
    static thread_local dflash_coupling * current = nullptr;
    return current;
}

dflash_coupling::dflash_coupling(const dflash_q_row * row, dflash_rng & rng, dflash_overlap * overlap)
    : row(row), rng(rng), overlap(overlap) {
    dflash_coupling_current() = this;
}

dflash_coupling::~dflash_coupling() {
    dflash_coupling_current() = nullptr;
}

void dflash_coupling::apply(llama_token_data_array & p) {
    if (row) {
        dflash_couple(p, *row, rng, overlap);
        row = nullptr;
    }
}

void dflash_apply_coupling(llama_token_data_array & p) {
    if (dflash_coupling * current = dflash_coupling_current()) {
        current->apply(p);
    }
}
