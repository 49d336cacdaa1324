// Drives the rejection rule of libdflash over one toy position: draws draft tokens from q, couples them with p, and prints
// counts for the Python test to judge.
//
//   reject SEED N_VOCAB N_CANDIDATES N_TRIALS RULE GREEDY TEMP TOP_K TOP_P MIN_P
//
// RULE: right    the library's rule
//       wrong-q  q of another position: the noted distribution is not the one the token was drawn from
//       from-p   after a rejection the token is drawn from p instead of the positive part of p - q
// One JSON object on stdout: p[], count[] per token, accepted, overlap (sum of min(p, q)).

#include "dflash-reject.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

static llama_sampler * make_chain(uint32_t seed, float temp, int top_k, float top_p, float min_p) {
    llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, llama_sampler_init_top_k(top_k));
    llama_sampler_chain_add(chain, llama_sampler_init_top_p(top_p, 1));
    llama_sampler_chain_add(chain, llama_sampler_init_min_p(min_p, 1));
    llama_sampler_chain_add(chain, llama_sampler_init_temp(temp));
    llama_sampler_chain_add(chain, llama_sampler_init_dist(seed));
    return chain;
}

int main(int argc, char ** argv) {
    if (argc != 11) {
        fprintf(stderr, "usage: reject SEED N_VOCAB N_CANDIDATES N_TRIALS RULE GREEDY TEMP TOP_K TOP_P MIN_P\n");
        return 2;
    }
    const uint32_t seed    = (uint32_t) atoi(argv[1]);
    const int      n_vocab = atoi(argv[2]);
    const int      n_cand  = atoi(argv[3]);
    const long     n_trial = atol(argv[4]);
    const char   * rule    = argv[5];
    const bool     greedy  = atoi(argv[6]) != 0;

    llama_sampler * chain = make_chain(seed, (float) atof(argv[7]), atoi(argv[8]), (float) atof(argv[9]), (float) atof(argv[10]));
    if (!dflash_chain_has_distribution(chain)) {
        fprintf(stderr, "the chain should have a distribution\n");
        return 1;
    }

    // target logits, and draft scores that agree with them in part
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal(0.0f, 1.5f);
    std::vector<float> logits(n_vocab);
    for (auto & l : logits) {
        l = normal(gen);
    }
    std::vector<llama_token> ids(n_vocab);
    for (int i = 0; i < n_vocab; ++i) {
        ids[i] = i;
    }
    std::sort(ids.begin(), ids.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    ids.resize(n_cand);
    std::shuffle(ids.begin(), ids.end(), gen);
    std::vector<float> scores(n_cand), other(n_cand);
    for (int i = 0; i < n_cand; ++i) {
        scores[i] = logits[ids[i]] + normal(gen);
        other [i] = normal(gen) * 2.0f;
    }

    dflash_rng rng;
    rng.seed(seed * 7919ull + 1);

    std::vector<llama_token_data> cur(n_vocab);
    std::vector<double> p(n_vocab, 0.0);
    std::vector<long>   count(n_vocab, 0);
    long   accepted = 0;
    double overlap  = 0.0;

    for (long trial = 0; trial < n_trial; ++trial) {
        dflash_q_row row;
        if (dflash_draw(chain, ids.data(), scores.data(), n_cand, greedy, rng, row) < 0) {
            fprintf(stderr, "no candidate left\n");
            return 1;
        }
        const llama_token drawn = row.drawn;
        if (strcmp(rule, "wrong-q") == 0) {
            dflash_draw(chain, ids.data(), other.data(), n_cand, greedy, rng, row);
            row.drawn = drawn;
        }

        for (int i = 0; i < n_vocab; ++i) {
            cur[i] = { i, logits[i], 0.0f };
        }
        llama_token_data_array arr = { cur.data(), cur.size(), -1, false };
        llama_sampler_apply(chain, &arr);
        const int64_t own = arr.selected; // the chain's own draw from p

        if (trial == 0) {
            for (size_t i = 0; i < arr.size; ++i) {
                p[arr.data[i].id] = arr.data[i].p;
            }
            for (size_t j = 0; j < row.ids.size(); ++j) {
                const double q = row.greedy ? (row.ids[j] == row.drawn ? 1.0 : 0.0) : row.q[j];
                overlap += std::min(p[row.ids[j]], q);
            }
        }
        const bool ok = dflash_couple(arr, row, rng, nullptr);
        if (!ok && strcmp(rule, "from-p") == 0) {
            arr.selected = own;
        }
        accepted += ok;
        count[arr.data[arr.selected].id]++;
    }

    printf("{\"accepted\": %ld, \"overlap\": %.17g, \"p\": [", accepted, overlap);
    for (int i = 0; i < n_vocab; ++i) {
        printf("%s%.17g", i ? ", " : "", p[i]);
    }
    printf("], \"count\": [");
    for (int i = 0; i < n_vocab; ++i) {
        printf("%s%ld", i ? ", " : "", count[i]);
    }
    printf("]}\n");

    llama_sampler_free(chain);
    return 0;
}
