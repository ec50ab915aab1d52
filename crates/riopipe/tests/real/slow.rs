//! A volume whose targets don't all answer at once: the quick ones must not take the wait for the
//! end of this host, and what is said of those that fail is why.

use std::net::TcpListener;
use std::time::Duration;

use riopipe::{CreateOptions, MemberAddr, OpenOptions, Volume};

use crate::crash::{Node, Proxy, soon, volume_on, with_loss_timeout};
use crate::late::Late;
use crate::site::create_options;

/// How long targets wait for a sign of life: half of what the test waits for.
const KEEP_ALIVE: Duration = Duration::from_secs(6);

/// Which of the connections to a target: the first asks for the name of its subsystem.
const ADMIN: usize = 1;
const DRIVES: usize = 2;

fn options() -> OpenOptions {
    let mut options = with_loss_timeout(Duration::ZERO);
    options.connect.keep_alive = KEEP_ALIVE;
    // Longer than the test waits for anything.
    options.connect.timeout = Duration::from_secs(300);
    options
}

/// Lets a slow target answer when a test has seen enough, or has failed.
struct Held<'a>(&'a Late);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Runs `work` over a quick target and one that says nothing on its connection `held` until the
/// quick one has been told of this host for longer than it waits.
fn with_a_slow_target<T: Send>(
    nodes: &[Node],
    held: usize,
    work: impl FnOnce(&[MemberAddr]) -> T + Send,
) -> T {
    let (quick, slow) = (Late::to(nodes[0].addr()), Late::to(nodes[1].addr()));
    slow.hold_only(held);
    let members = [quick.member(), slow.member()];
    std::thread::scope(|scope| {
        let working = scope.spawn(move || work(&members));
        let held = Held(&slow);
        soon("the slow one is waited for", || slow.is_waited_for());
        let before = quick.keep_alives();
        // Three for each time that the target waits.
        soon("the quick one is told", || {
            assert!(!working.is_finished(), "nothing ends before the slow target answers");
            quick.keep_alives() >= before + 4
        });
        drop(held);
        working.join().unwrap()
    })
}

#[test]
fn a_slow_target_costs_no_other_its_connection_while_a_volume_is_opened() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    for held in [ADMIN, DRIVES] {
        let (volume, _) =
            with_a_slow_target(&nodes, held, |members| Volume::open("v", members, &options()))
                .unwrap();
        volume.close().unwrap();
    }
}

#[test]
fn a_slow_target_costs_no_other_its_connection_while_a_volume_is_made() {
    let nodes = [Node::new(), Node::new()];
    let create = CreateOptions { connect: options().connect, ..create_options() };
    with_a_slow_target(&nodes, DRIVES, |members| Volume::create("v", members, &create)).unwrap();
}

#[test]
fn every_target_that_fails_is_named_with_its_reason() {
    let nodes = [Node::new()];
    let closed = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (one, two) = (closed(), closed());
    let member = |addr: std::net::SocketAddr| MemberAddr {
        nqn: Some("nqn.2026-01.org.example:nobody".into()),
        ..addr.to_string().parse().unwrap()
    };
    let members = [member(one), nodes[0].member(), member(two)];
    let text = Volume::open("v", &members, &options()).unwrap_err().to_string();
    for words in ["2 of the volume's targets", &one.to_string(), &two.to_string(), "refused"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(!text.contains(&nodes[0].addr().to_string()), "{text}");
}

/// A target that drops its connections while another is waited for is named, and not a queue.
#[test]
fn a_target_that_drops_the_connection_meanwhile_is_named() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let (quick, slow) = (Late::to(nodes[0].addr()), Late::to(nodes[1].addr()));
    let breaks = Proxy::to(quick.addr());
    slow.hold_only(ADMIN);
    let members = [breaks.member(), slow.member()];
    let error = std::thread::scope(|scope| {
        let working = scope.spawn(|| Volume::open("v", &members, &options()));
        let held = Held(&slow);
        soon("the slow one is waited for", || slow.is_waited_for());
        soon("the other one is up", || quick.keep_alives() > 0);
        breaks.cut();
        drop(held);
        working.join().unwrap().unwrap_err()
    });
    let text = error.to_string();
    let name = breaks.member().socket();
    assert!(text.contains(&format!("target {name}")), "{text}");
    assert!(text.contains("dropped the connection after"), "{text}");
}
