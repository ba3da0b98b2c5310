#include <string.h>
#include "utf8.h"

/* How the bytes at s begin a character (the table of well-formed sequences in RFC 3629, section 4):
 * its length when complete and valid, 0 when it is cut by the end of input, -1 when no continuation could make it valid. */
static int classify(const uint8_t *s, size_t n)
{
    uint8_t b = s[0], lo = 0x80, hi = 0xbf;
    int len;
    if (b < 0x80)
        return 1;
    if (b < 0xc2 || b > 0xf4)
        return -1;
    len = b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
    if (b == 0xe0)
        lo = 0xa0;      /* shorter forms exist */
    else if (b == 0xed)
        hi = 0x9f;      /* surrogates */
    else if (b == 0xf0)
        lo = 0x90;
    else if (b == 0xf4)
        hi = 0x8f;      /* past U+10FFFF */
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n)
            return 0;
        if (s[i] < lo || s[i] > hi)
            return -1;
        lo = 0x80;
        hi = 0xbf;
    }
    return len;
}

long pd_utf8_invalid(const char *text, size_t n)
{
    const uint8_t *s = (const uint8_t *)text;
    for (size_t i = 0; i < n;) {
        uint64_t word;
        while (i + 8 <= n && (memcpy(&word, s + i, 8), !(word & 0x8080808080808080ull)))
            i += 8;
        if (i >= n)
            break;
        int len = classify(s + i, n - i);
        if (len <= 0)
            return (long)i;
        i += (size_t)len;
    }
    return -1;
}

size_t pd_utf8_complete(const char *text, size_t n)
{
    const uint8_t *s = (const uint8_t *)text;
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        uint8_t b = s[n - back];
        if (b < 0x80)
            break;
        if (b >= 0xc0)
            return classify(s + n - back, back) == 0 ? n - back : n;
    }
    return n;
}

int pd_utf8_next(const char *text, size_t n, uint32_t *cp)
{
    const uint8_t *s = (const uint8_t *)text;
    int len = classify(s, n);
    if (len <= 0) {
        *cp = 0xfffd;
        return 1;
    }
    static const uint8_t mask[5] = { 0, 0x7f, 0x1f, 0x0f, 0x07 };
    *cp = s[0] & mask[len];
    for (int i = 1; i < len; i++)
        *cp = *cp << 6 | (s[i] & 0x3f);
    return len;
}

int pd_utf8_put(uint32_t cp, char out[4])
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}
