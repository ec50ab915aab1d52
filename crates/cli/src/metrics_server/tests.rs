use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream as Client;
use std::time::Instant;

use super::*;

/// Metrics with this number of bytes, or none.
struct Thing(Result<usize, StatError>);

impl StatSource for Thing {
    fn about(&self) -> &str {
        "A thing's metrics"
    }

    fn open_metrics(&self) -> Result<String, StatError> {
        self.0.clone().map(|bytes| "m".repeat(bytes))
    }

    fn json(&self) -> Result<String, StatError> {
        self.0.clone().map(|_| "{}".to_owned())
    }

    fn health(&self) -> Result<(), StatError> {
        self.0.clone().map(|_| ())
    }
}

/// Longer than any test takes, on a machine with any load.
const FOR_EVER: Duration = Duration::from_secs(3600);

fn server(bytes: usize) -> MetricsServer {
    serve_thing(Thing(Ok(bytes)), FOR_EVER)
}

fn serve_thing(thing: Thing, limit: Duration) -> MetricsServer {
    let address = MetricsAddress::take("127.0.0.1:0", 9420).unwrap();
    address.serve_with_timeout(Arc::new(thing), limit).unwrap()
}

fn connect(server: &MetricsServer) -> Client {
    let socket = Client::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    socket
}

fn ask(server: &MetricsServer, request: &str) -> String {
    let mut socket = connect(server);
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

fn get(server: &MetricsServer, path: &str) -> String {
    ask(server, &format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"))
}

#[test]
fn only_loopback_addresses_are_served() {
    let refused = MetricsAddress::take("0.0.0.0", 0).err().unwrap();
    assert!(refused.to_string().contains("other machines; metrics know no auth"), "{refused}");
    assert_eq!(refused.into_failure().code, Code::Usage);
    let first = server(0);
    let taken = MetricsAddress::take("127.0.0.1", first.address().port()).err().unwrap();
    assert!(matches!(taken, MetricsError::Listen(_)), "{taken}");
}

#[test]
fn each_request_gets_its_answer() {
    let server = server(7);
    let metrics = get(&server, "/metrics");
    assert!(metrics.starts_with("HTTP/1.1 200 ") && metrics.ends_with("\r\n\r\nmmmmmmm"));
    assert!(metrics.contains("Content-Type: application/openmetrics-text"), "{metrics}");
    assert!(get(&server, "/stat?pretty").ends_with("\r\n\r\n{}"));
    let other = get(&server, "/");
    assert!(other.starts_with("HTTP/1.1 404 ") && other.contains("A thing's metrics: /metr"));
    let head = ask(&server, "HEAD /metrics HTTP/1.0\r\n\r\n");
    assert!(head.contains("Content-Length: 7\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    let post = ask(&server, "POST /stat HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
    assert!(post.starts_with("HTTP/1.1 405 ") && post.contains("Allow: GET, HEAD"), "{post}");
    assert!(ask(&server, "what?\r\n\r\n").starts_with("HTTP/1.1 400 "));
    let long = format!("GET /stat HTTP/1.1\r\nCookie: {}", "x".repeat(HEAD_BYTES_MAX));
    assert!(ask(&server, &long[..HEAD_BYTES_MAX]).starts_with("HTTP/1.1 431 "));
}

#[test]
fn metrics_of_a_closed_source_are_reported_gone() {
    let gone = serve_thing(Thing(Err(StatError::Gone("the thing has been closed"))), FOR_EVER);
    for path in ["/metrics", "/stat", "/healthz"] {
        let answer = get(&gone, path);
        assert!(answer.starts_with("HTTP/1.1 410 Gone\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\nthe thing has been closed\n"), "{answer}");
    }
    let healthy = get(&server(7), "/healthz");
    assert!(healthy.starts_with("HTTP/1.1 200 ") && healthy.ends_with("\r\n\r\nok\n"), "{healthy}");
    let unhealthy = Thing(Err(StatError::Unhealthy("its log has failed".into())));
    let unhealthy = get(&serve_thing(unhealthy, FOR_EVER), "/healthz");
    assert!(unhealthy.starts_with("HTTP/1.1 503 ") && unhealthy.ends_with("its log has failed\n"));
    let broken = get(&serve_thing(Thing(Err(StatError::Encoding)), FOR_EVER), "/stat");
    assert!(broken.starts_with("HTTP/1.1 500 "), "{broken}");
}

/// With one client after another, each idle one would cost an hour.
#[test]
fn idle_clients_delay_no_others() {
    let server = server(10);
    let idle: Vec<_> = (0..3 * CLIENTS_MAX).map(|_| connect(&server)).collect();
    for _ in 0..5 {
        assert!(get(&server, "/metrics").ends_with("mmmmmmmmmm"));
    }
    // The first ones were dropped for the last ones.
    for mut socket in idle.into_iter().take(2 * CLIENTS_MAX) {
        assert_dropped(&mut socket);
    }
}

#[test]
fn idle_clients_are_dropped_when_their_time_is_up() {
    let limit = Duration::from_millis(300);
    let server = serve_thing(Thing(Ok(10)), limit);
    let began = Instant::now();
    let mut idle: Vec<_> = (0..CLIENTS_MAX).map(|_| connect(&server)).collect();
    idle.iter_mut().for_each(assert_dropped);
    assert!(began.elapsed() >= limit, "{:?}", began.elapsed());
}

fn assert_dropped(socket: &mut Client) {
    let read = socket.read(&mut [0; 1]);
    let waits = |error: &std::io::Error| {
        matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
    };
    assert!(!matches!(&read, Ok(1)) && !read.as_ref().is_err_and(waits), "{read:?}");
}

#[test]
fn slow_clients_are_served_beside_others() {
    // More than the kernel takes at once.
    let bytes = 16 << 20;
    let server = server(bytes);
    let mut reader = connect(&server);
    reader.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut speaker = connect(&server);
    for part in ["GET /st", "at HTTP/1.1\r\nHost: a\r", "\n\r\n"] {
        speaker.write_all(part.as_bytes()).unwrap();
        assert!(get(&server, "/").starts_with("HTTP/1.1 404 "));
    }
    let mut answer = String::new();
    speaker.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with("{}"), "{answer}");
    let mut answer = Vec::new();
    reader.read_to_end(&mut answer).unwrap();
    assert!(answer.len() > bytes, "{} of {bytes} bytes", answer.len());
}

#[test]
fn dropping_the_server_ends_it_even_with_clients() {
    let server = server(0);
    let mut idle = connect(&server);
    let address = server.address();
    drop(server);
    assert!(!matches!(idle.read(&mut [0; 1]), Ok(1)));
    assert!(Client::connect(address).is_err());
}
