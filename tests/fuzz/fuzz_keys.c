/* Text as a key file: what is accepted has whole, distinct ids; what is refused is so with words that hold no key. */
#include <stdlib.h>
#include <string.h>
#include "../../libcommon/wire/tls.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct pd_keys *k = NULL;
    struct pd_err e = { 0 };
    if (pd_keys_parse((const char *)p, n, "keys", &k, &e) == 0) {
        if (pd_keys_count(k) < 1)
            abort();
        for (int i = 0; i < pd_keys_count(k); i++) {
            const char *id = pd_keys_id(k, i);
            if (!*id || strlen(id) > PD_KEY_ID_MAX || !memmem(p, n, id, strlen(id)))
                abort();
            for (int j = 0; j < i; j++)
                if (!strcmp(id, pd_keys_id(k, j)))
                    abort();
        }
    } else if (k || !e.msg[0])
        abort();
    pd_keys_free(k);
    return 0;
}
