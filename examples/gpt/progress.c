/* SPDX-License-Identifier: MIT */
/* The line that is watched. On standard error, which is unbuffered: each line is one write. */
#include "progress.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "job.h"

static const double redraw_s = 0.1;
enum { PLAIN_LINES = 20, BAR_MOST = 30 };

void progress_begin(progress *p, const char *label, int steps, double tokens_a_step)
{
    *p = (progress){.label = label, .steps = steps, .tokens_a_step = tokens_a_step, .exposed = -1.0, .held_out = -1.0};
    p->terminal = isatty(STDERR_FILENO) != 0;
    p->begun_s = job_now_s();
}

static int columns(void)
{
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col : 80;
}

/* "18.2k", so that the width stays. */
static void print_count(char *out, size_t room, double count)
{
    if (count >= 1e6) snprintf(out, room, "%.2fM", count / 1e6);
    else if (count >= 1e3) snprintf(out, room, "%.1fk", count / 1e3);
    else snprintf(out, room, "%.0f", count);
}

/* Appends to a line of `room` bytes; what does not fit is cut off. */
__attribute__((format(printf, 3, 4))) static void append(char *line, size_t room, const char *format, ...)
{
    const size_t at = strlen(line);
    va_list args;
    va_start(args, format);
    vsnprintf(line + at, room - at, format, args);
    va_end(args);
}

static void describe(const progress *p, int step, float loss, char *line, size_t room)
{
    const double elapsed_s = job_now_s() - p->begun_s, training_s = elapsed_s - p->evaluating_s;
    const double left_s = elapsed_s / step * (p->steps - step);
    char speed[16];
    print_count(speed, sizeof speed, step * p->tokens_a_step / (training_s > 0.0 ? training_s : 1e-9));
    append(line, room, "%*d/%d  loss %.4f", p->steps >= 1000 ? 5 : 3, step, p->steps, (double)loss);
    if (p->held_out >= 0.0) append(line, room, "  held-out %.3f", p->held_out);
    else if (p->terminal) append(line, room, "  held-out  --- "); /* so that the bar keeps its width */
    append(line, room, "  %s tokens/s", speed);
    if (p->exposed >= 0.0) append(line, room, "  exposed %2.0f %%", 100.0 * p->exposed);
    else if (p->terminal) append(line, room, "  exposed -- %%");
    if (p->memory_bytes > 0) append(line, room, "  %.1f MiB a rank", (double)p->memory_bytes / 1048576.0);
    append(line, room, "  %d:%02d left", (int)left_s / 60, (int)left_s % 60);
}

void progress_step(progress *p, int step, float loss)
{
    if (!p) return;
    const double now_s = job_now_s();
    const int every = p->steps / PLAIN_LINES > 0 ? p->steps / PLAIN_LINES : 1;
    if (p->terminal ? now_s - p->drawn_s < redraw_s && step != p->steps
                    : step % every != 0 && step != 1 && step != p->steps)
        return;
    p->drawn_s = now_s;
    char text[200] = "", bar[BAR_MOST + 1] = "", line[300] = "";
    describe(p, step, loss, text, sizeof text);
    if (!p->terminal) {
        fprintf(stderr, "%s %s\n", p->label, text);
        return;
    }
    const int room = columns() - (int)strlen(p->label) - (int)strlen(text) - 5;
    const int width = room < 5 ? 0 : room > BAR_MOST ? BAR_MOST : room;
    memset(bar, '-', (size_t)width);
    memset(bar, '#', (size_t)((long)width * step / p->steps));
    snprintf(line, sizeof line, width > 0 ? "%s [%s] %s" : "%s%s %s", p->label, bar, text);
    fprintf(stderr, "\r%.*s\x1b[K", columns() - 1, line);
}

void progress_evaluated(progress *p, int step, double held_out, double took_s)
{
    if (!p) return;
    p->held_out = held_out;
    p->evaluating_s += took_s;
    if (!p->terminal)
        fprintf(stderr, "%s %*d/%d  held-out loss %.4f\n", p->label, p->steps >= 1000 ? 5 : 3, step, p->steps,
                held_out);
}

void progress_end(progress *p)
{
    if (p && p->terminal) fputs("\r\x1b[K", stderr);
}
