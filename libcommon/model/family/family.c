#include <stddef.h>
#include <string.h>
#include "family.h"

static const struct pd_family *const families[] = { &pd_family_llama };

const struct pd_family *pd_family_find(const char *arch)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (!strcmp(families[i]->arch, arch))
            return families[i];
    return NULL;
}
