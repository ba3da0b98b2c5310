/* Bytes as a ledger's file: its sums are those of its items, and ending them all leaves nothing. */
#include <stdlib.h>
#include <string.h>
#include "../../libcommon/route/ledger.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_ledger *l = NULL;
    struct pd_ledger_read was;
    struct pd_ledger_sum sum = { 0 }, all;
    uint64_t torn;
    if (pd_ledger_open(NULL, &l, &was, NULL) < 0 || pd_ledger_read(l, p, n, &torn, NULL) < 0 || torn > n)
        abort();
    for (struct pd_ledger_item *i = pd_ledger_first(l); i; i = (void *)i->node.next) {
        if (!i->left || pd_ledger_find(l, i->run, i->attempt) != i)
            abort();
        if (i->taken)
            continue;
        if (!pd_ledger_of_link(l, i->p, i->d).runs || pd_ledger_of(l, i->p).blocks < i->blocks)
            abort();
        sum.runs++;
        sum.tokens += i->tokens;
        sum.blocks += i->blocks;
        sum.bytes += i->bytes;
    }
    all = pd_ledger_all(l);
    if (memcmp(&sum, &all, sizeof sum))
        abort();
    while (pd_ledger_first(l))
        pd_ledger_end(l, pd_ledger_first(l));
    for (const struct pd_ledger_hold *h; (h = pd_ledger_first_hold(l));)
        if (pd_ledger_held(l, h->p, h->d) != h || !pd_ledger_release(l, h->p, h->d, "x", 0))
            abort();
    all = pd_ledger_all(l);
    if (all.runs || all.tokens || all.blocks || all.bytes)
        abort();
    pd_ledger_free(l);
    return 0;
}
