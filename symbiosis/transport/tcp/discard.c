/* Frames of a ZeroMQ message that are thrown away, some at a time. ZeroMQ's functions are handed in: there is no header to compile with. */

typedef struct { _Alignas(8) unsigned char bytes[64]; } frame_t; /* zmq_msg_t */
typedef int (*of_frame)(frame_t *);
typedef int (*receive_t)(frame_t *, void *, int);

enum { DONTWAIT = 1 };

/* Whether more frames of the message come behind these. */
int discard(void *socket, int most, of_frame init, receive_t receive, of_frame more, of_frame end) {
    frame_t frame;
    int going = 1;
    init(&frame);
    while (going && most-- > 0)
        going = receive(&frame, socket, DONTWAIT) >= 0 && more(&frame);
    end(&frame);
    return going;
}
