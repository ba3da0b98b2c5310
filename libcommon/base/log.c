#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "clock.h"
#include "log.h"

#define PROGRESS_AFTER_US 2000000
#define PROGRESS_EVERY_US 200000

static char program[32] = "pd";
static int verbosity;
static bool be_quiet;

/* The progress line; a message erases it, the next progress call draws it again. */
static struct {
    pthread_mutex_t lock;
    int tty;            /* -1: not asked yet */
    int64_t since_us, drawn_us;
    bool shown;
} bar = { .lock = PTHREAD_MUTEX_INITIALIZER, .tty = -1 };

void pd_log_init(const char *name, int verbose, bool quiet)
{
    const char *slash = strrchr(name, '/');
    snprintf(program, sizeof program, "%s", slash ? slash + 1 : name);
    verbosity = verbose;
    be_quiet = quiet;
}

int pd_log_verbose(void) { return verbosity; }

static void write_all(const char *p, size_t n)
{
    while (n) {
        ssize_t k = write(STDERR_FILENO, p, n);
        if (k < 0 && errno != EINTR)
            return;     /* there is nobody left to tell */
        if (k > 0) {
            p += k;
            n -= (size_t)k;
        }
    }
}

/* Text from a record may hold control characters that would steer the reader's terminal or fake a second line. */
static void tame(char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] < 0x20 || s[i] == 0x7f)
            s[i] = s[i] == '\n' || s[i] == '\t' ? ' ' : '?';
}

static void say(const char *fmt, va_list ap)
{
    char line[1200];
    int head = snprintf(line, sizeof line, "%s: ", program);
    int n = vsnprintf(line + head, sizeof line - (size_t)head - 1, fmt, ap);
    size_t len = n < 0 ? (size_t)head : (size_t)head + (size_t)n;
    if (len > sizeof line - 2)
        len = sizeof line - 2;
    tame(line, len);
    line[len++] = '\n';
    pthread_mutex_lock(&bar.lock);
    if (bar.shown)
        write_all("\r\033[K", 4);
    bar.shown = false;
    write_all(line, len);
    pthread_mutex_unlock(&bar.lock);
}

void pd_error(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
}

void pd_warn(const char *fmt, ...)
{
    if (be_quiet)
        return;
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
}

void pd_info(const char *fmt, ...)
{
    if (!verbosity || be_quiet)
        return;
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
}

static size_t columns(void)
{
    struct winsize w;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) || w.ws_col < 20 ? 79 : w.ws_col - 1u;
}

void pd_progress(const char *fmt, ...)
{
    if (be_quiet)
        return;
    pthread_mutex_lock(&bar.lock);
    if (bar.tty < 0)
        bar.tty = isatty(STDERR_FILENO) == 1;
    if (bar.tty) {
        int64_t now = pd_mono_us();
        if (!bar.since_us)
            bar.since_us = now;
        if (now - bar.since_us >= PROGRESS_AFTER_US && now - bar.drawn_us >= PROGRESS_EVERY_US) {
            char line[512] = "\r";
            va_list ap;
            va_start(ap, fmt);
            int n = vsnprintf(line + 1, sizeof line - 8, fmt, ap);
            va_end(ap);
            size_t len = n < 0 ? 0 : (size_t)n, most = columns();
            len = len > sizeof line - 9 ? sizeof line - 9 : len;
            len = len > most ? most : len;
            tame(line + 1, len);
            memcpy(line + 1 + len, "\033[K", 3);
            write_all(line, 1 + len + 3);
            bar.drawn_us = now;
            bar.shown = true;
        }
    }
    pthread_mutex_unlock(&bar.lock);
}

void pd_progress_end(void)
{
    pthread_mutex_lock(&bar.lock);
    if (bar.shown)
        write_all("\r\033[K", 4);
    bar.shown = false;
    bar.since_us = bar.drawn_us = 0;
    pthread_mutex_unlock(&bar.lock);
}
